"""A prompt's pass in streams: its micro-batches run beside each other, and its parts beside decode steps of answers.

While answers run, a pass is queued in parts of some layers, and decode steps are queued between the parts. The default
stream has all that is no pass: steps, the choice of tokens, copies. Events order the streams:

    default stream    waits for part 1 │ step 1 ............ │ waits for part 2 │ step 2 ............ │ ...
    micro-batches     part 1           │ part 2 .....................│ part 3 .......................│ ...

    a step waits for the part before it
    a part waits for the last step but one, so the step right before it runs at the same time

A step waits for memory most of the time, and a part computes. Together they take as long as in turns, but the pauses of
answers are shorter (benchmarks/results.md). Kernels of the default stream have priority on an SM
(`NvidiaCard.stream`). A step that got nothing of the card beside a part has the card to itself when the part is over,
because the next part waits for it. Then nothing is gained: answers pause as long as if parts and steps took turns, and
after the first part of each pass for two parts.

A step and the part beside it change nothing that the other one uses. A pass gets its slot, pages and checkpoints before
its first part, which waits for all that was queued earlier; and steps have scratch memory of their own
(`Model.step_scratch` in qengine.py). Since the default stream waits for each part, all queued work of a cancelled
prompt ends before its slot and pages are used again.

A pass of one micro-batch runs in the default stream, so its parts and the steps take turns. That is a pass of few rows,
or of experts in host memory, or any on an emulated card. Several cards hand on whole passes, which take turns, too.
"""

import collections
import contextlib
import itertools
from typing import NamedTuple

from kernels.card import Event


class MicroBatch:
    """A part of a prompt's pass, in a stream of its own. Each kernel leaves SMs idle in its last round of thread
    blocks; kernels of other micro-batches use these SMs.

    In each layer a micro-batch waits until the one before has written the layer's states, or keys and values. Nothing
    else orders the micro-batches. benchmarks/results.md says what they gain.
    """

    def __init__(self, stream, before: "MicroBatch | None"):
        self.stream, self.before = stream, before
        self.done = collections.deque()     # an event per layer that is queued here and not yet in the next micro-batch
        self.turn = before.turn if before else collections.deque(maxlen=1)  # the end of the latest of `in_turns`

    def queue(self, layers):
        """Runs the generator `layers` with this micro-batch's stream; yields after each layer."""
        while True:
            with self.stream.card.on(self.stream):
                if next(layers, None) is None:
                    return
            yield

    @contextlib.contextmanager
    def in_order(self):
        """A layer changes states or pages inside. The micro-batch before must have been queued up to this layer."""
        if self.before:
            self.stream.wait(self.before.done.popleft())
        yield
        self.done.append(self.stream.record())

    @contextlib.contextmanager
    def in_turns(self, needed):
        """If needed, what is queued inside uses memory that micro-batches share. It then waits for all that
        micro-batches of the pass have queued in this way before."""
        for event in self.turn if needed else ():
            self.stream.wait(event)
        yield
        if needed:
            self.turn.append(self.stream.record())


class Alone:
    """What stands for the micro-batch of a pass that has only one."""

    in_order = in_turns = contextlib.nullcontext


class Span(NamedTuple):
    """When a part runs: from the last of `begins` to `end`. The part before it must be over, too, for it to count as
    running: the first micro-batch is ahead of the others."""

    begins: list[Event]
    end: Event

    @property
    def seconds(self) -> float:
        """How long the part took. It must be over."""
        return min(self.end.seconds_since(begin) for begin in self.begins)


class PassInParts:
    """A pass over a prompt whose layers are queued some at a time. Decode steps are queued between two parts.

    A part in streams does not wait for a step that was queued right before it, see the top of this file.
    """

    def __init__(self, default_stream, streams, layers):
        """streams: those of the micro-batches, if there are several. layers: an iterator; it queues a layer each time
        it is asked for the next one."""
        self.default_stream, self.streams, self.layers = default_stream, streams, layers
        self.before = None          # where the default stream stood when the last part was queued
        self.ends = []              # of the last part that was timed

    def queue(self, n_layers: int | None = None):
        """Queue the next n_layers, or all that are left. They begin after what was queued before the part before them;
        the first part begins after all that is queued before it. What is queued later begins after them."""
        if self.streams:
            now = self.default_stream.record()
            for stream in self.streams:
                stream.wait(self.before or now)
            self.before = now
        for _ in itertools.islice(self.layers, n_layers):
            pass
        for stream in self.streams:
            self.default_stream.wait(stream.record())

    def queue_timed(self, n_layers: int | None = None) -> Span:
        """What `queue` does. Returns when that happens on the card."""
        first, *_ = self.streams or [self.default_stream]
        begins = [*self.ends, first.record(), self.before or self.default_stream.record()]
        self.queue(n_layers)
        self.ends = [self.default_stream.record()]
        return Span(begins, *self.ends)
