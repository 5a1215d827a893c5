"""Hidden states on their way from a card to the next one."""

import collections

import numpy as np

from engine.worker import Task
from kernels.card import Event

QUEUEING = 100e-6           # seconds, about, that the host needs to queue the copies of a hop in streams of their own


class Edge:
    """The way of hidden states from a stage to the next stage's card: a hop.

        x → outgoing ──copies out──→ pinned host memory ──copies in──→ incoming → x

    The memory between the two ends exists twice, so the layers go on and the next hop may follow while one hop is on
    its way. Hidden states cross as the float32 of the residual stream: in fewer bits, answers would depend on the
    split. Between the two copies the host waits for the first one. The host waits, not the downstream card: on the
    hardware that this is made for, a card that waits for another card's event may read stale data
    (notebooks/08_across_cards.ipynb).

    Few rows, as those of a decode step, skip outgoing and incoming: x → pinned → x, in the default streams.
    Their copies take less time than queueing copies in other streams, and both cards would wait for the queueing.

    upstream and downstream are Stages (qengine.py).
    """

    def __init__(self, upstream, downstream):
        self.upstream, self.downstream = upstream, downstream
        upstream.exit = downstream.entry = self
        shape = upstream.max_rows, upstream.config.hidden_dim
        self.pinned = [upstream.card.pinned(shape, np.float32) for _ in range(2)]
        self.copies_out, self.copies_in = upstream.card.stream("copies out"), downstream.card.stream("copies in")
        self.n_sent = self.n_received = 0
        self.n_direct = sum(max(stage.costs.hop_seconds(n) for stage in (upstream, downstream)) <= QUEUEING
                            for n in range(1, upstream.step_rows + 1))       # hops of up to so many rows go straight
        # By half: outgoing may be written again after event has_left, pinned after has_come, incoming after was_read.
        self.has_left, self.has_come, self.was_read = [None] * 2, [None] * 2, [None] * 2
        self.receipts = collections.deque([None] * 2, maxlen=2)     # the tasks that received the last two hops

    def send(self, n: int, freed: Task | None) -> Event:
        """Queue what upstream's card does for n rows of its scratch.x. Returns the event after which they are on the
        host. freed: the task that received the last hop of this half; it must be over before the half is written."""
        card, half, is_direct = self.upstream.card, self.n_sent % 2, n <= self.n_direct
        self.n_sent += 1
        stream = card.default_stream if is_direct else self.copies_out
        if not is_direct:
            if self.has_left[half]:
                card.default_stream.wait(self.has_left[half])
            card.copy(self.upstream.outgoing[half][:n], self.upstream.model.scratch.x[:n])
            stream.wait(card.default_stream.record())
        if freed:
            freed.wait()
        if self.has_come[half]:
            self.downstream.worker.wait(self.has_come[half])
        # Looked up after the waits: a thread that waits for ever must not keep memory of the card alive.
        leaving = (self.upstream.model.scratch.x if is_direct else self.upstream.outgoing[half])[:n]
        card.copy_out(self.pinned[half][:n], leaving, stream)
        self.has_left[half] = stream.record()
        return self.has_left[half]

    def receive(self, n: int, on_host: Event):
        """Queue what downstream's card does for n rows of its scratch.x, once they are on the host. While this thread
        works after that wait, both cards may be idle, so it does little."""
        card, half, is_direct = self.downstream.card, self.n_received % 2, n <= self.n_direct
        self.n_received += 1
        stream = card.default_stream if is_direct else self.copies_in
        if self.was_read[half] and not is_direct:
            stream.wait(self.was_read[half])
        self.upstream.worker.wait(on_host)
        x = self.downstream.model.scratch.x
        coming = (x if is_direct else self.downstream.incoming[half])[:n]
        card.copy_in(coming, self.pinned[half][:n], stream)
        self.has_come[half] = stream.record()
        if not is_direct:
            card.default_stream.wait(self.has_come[half])
            card.copy(x[:n], coming)
            self.was_read[half] = card.default_stream.record()
