"""Brings the bytes of a file to a card, as fast as the link takes them; the host does not look at them.

    file ──threads──→ pinned buffer ──copy──→ raw bytes on the card ──kernel──→ where they belong
                      two of each: one piece is copied while threads fill the next

The host only moves bytes: a kernel on the card repacks the raw bytes into what the tensor's format asks for
(kernels/formats). Several threads read, because one alone is slower than a fast link.

The link is the bound: PCIe 4 x16 takes 25 GB/s, PCIe 1 x1 0.2 GB/s. Measured: benchmarks/results.md, section upload.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np

from kernels.workers import usable_processors

PIECE = 16 << 20            # bytes of a buffer
SHARE = 1 << 20             # bytes that one thread reads at a time
MOST_THREADS = 4            # more read no faster


class _Buffer:
    """A piece on its way: pinned host memory, raw memory on the card, and the event after which both are free."""

    def __init__(self, card, nbytes):
        self.host, self.raw = card.pinned(nbytes, np.uint8), card.alloc(nbytes, np.uint8, "raw bytes of a file")
        self.is_free = None


class Feeder:
    """Brings bytes of a file to a card in pieces. It holds 2 buffers of `piece` bytes there until it is
    dropped, and is used from one thread."""

    def __init__(self, card, piece=PIECE):
        self.card, self.piece = card, piece
        self._stream = card.stream("feeder")
        self._buffers = cycle([_Buffer(card, piece) for _ in range(2)])
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, usable_processors()), "feeder")

    def pieces(self, read, nbytes, unit):
        """Yields (index of its first unit, raw) for each piece of so many bytes, a whole number of units of `unit`
        bytes.

        read(start, into): fills a NumPy array uint8 with bytes from `start` on; several threads call it. What it raises
        is raised here. raw: uint8 Array on the card, whole units, aligned as any array; kernels on the default stream
        may read it that are launched before the next piece is asked for.
        """
        step = self.piece // unit * unit
        if not step or nbytes % unit:
            raise ValueError(f"{nbytes} bytes cannot be fed in units of {unit}, at most {self.piece} at a time")
        for start in range(0, nbytes, step):
            buffer = next(self._buffers)
            if buffer.is_free is not None:
                buffer.is_free.synchronize()
            host = buffer.host[:min(step, nbytes - start)]
            self._fill(host, read, start)
            raw = buffer.raw[:host.size]
            self.card.copy_in(raw, host, self._stream)
            self.card.default_stream.wait(self._stream.record())
            yield start // unit, raw
            buffer.is_free = self.card.default_stream.record()

    def _fill(self, host, read, start):
        """Reading releases Python's lock."""
        starts = range(0, host.size, SHARE)
        for _ in (self._threads.map if len(starts) > 1 else map)(
                lambda at: read(start + at, host[at:at + SHARE]), starts):
            pass
