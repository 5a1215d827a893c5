"""Passes over prompts in streams (micro-batches) and in parts, which are timed."""

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

    def queue(self, layers):
        """Runs the generator `layers` with this micro-batch's stream; yields after each layer."""
        while True:
            with self.stream.card.on(self.stream):
                if next(layers, None) is None:
                    return
            yield

    @contextlib.contextmanager
    def in_order(self):
        """See `PromptPass`. The micro-batch before must have been queued up to this layer."""
        if self.before:
            self.stream.wait(self.before.done.popleft())
        yield
        self.done.append(self.stream.record())


class Span(NamedTuple):
    """When a part runs."""

    begin: Event
    end: Event

    @property
    def seconds(self) -> float:
        """How long the part took. It must be over."""
        return self.end.seconds_since(self.begin)


class PassInParts:
    """A pass over a prompt whose layers are queued some at a time. Between two parts the card may do decode steps."""

    def __init__(self, default_stream, streams, layers):
        """streams: those of the micro-batches, if there are several. layers: an iterator; it queues a layer each time
        it is asked for the next one."""
        self.default_stream, self.streams, self.layers = default_stream, streams, layers

    def queue(self, n_layers: int | None = None):
        """Queue the next n_layers, or all that are left. They begin after all that is queued before them, and what is
        queued later begins after them."""
        if self.streams:
            begin = self.default_stream.record()
            for stream in self.streams:
                stream.wait(begin)
        for _ in itertools.islice(self.layers, n_layers):
            pass
        for stream in self.streams:
            self.default_stream.wait(stream.record())

    def queue_timed(self, n_layers: int | None = None) -> Span:
        """What `queue` does. Returns when that happens on the card."""
        begin = self.default_stream.record()
        self.queue(n_layers)
        return Span(begin, self.default_stream.record())
