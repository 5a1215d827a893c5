"""The table of token embeddings in host memory, for cards that lack room for it.

A pass reads one row of the table for each of its tokens, so kernels/embedding.py can as well read it over the link, by
its address. A 27B in Q4_K has 701 MB of embeddings, of which a token needs 2.9 KB: 12 us over a link of 0.25 GB/s.
"""

import contextlib

from engine.expert_store import HostCard, arrays_of, on_host
from engine.weights import Loader
from kernels.card import CardError, PlannedCard
from kernels.operands import Matrix


class HostTable:
    """Where a Loader's `table` puts the table. from_file: a Loader that puts it into the memory of `host`."""

    def __init__(self, card, host, from_file: Loader):
        self.card, self.host, self.from_file = card, host, from_file

    def add(self, name: str) -> Matrix:
        """A Matrix in host memory, which the card reads. Raises CardError if none can be page-locked."""
        matrix = self.from_file.matrix(name)
        if isinstance(self.card, PlannedCard):
            return matrix
        if self.host.refusal:
            raise CardError(f"the card lacks memory for {name}, and host memory cannot be page-locked for it: allow "
                            "more locked memory (`ulimit -l`, a container's limit), or take a shorter context (--ctx)")
        reached = (self.card.attach(on_host(array), name) for array in arrays_of(matrix))
        return Matrix(matrix.format, matrix.n, matrix.k, *reached)


@contextlib.contextmanager
def loading(weights, loader: Loader, is_wanted: bool):
    """Inside, `loader` puts the table of token embeddings into host memory, if that is wanted."""
    if not is_wanted:
        yield
        return
    host = (PlannedCard if isinstance(loader.card, PlannedCard) else HostCard)(loader.card)
    with weights.loading(host) as from_file:
        loader.host_table = HostTable(loader.card, host, from_file)
        yield
        host.synchronize()
    loader.host_table = None


def bytes_of(model) -> int:
    """Bytes of a Model's table, if it has one that multiplies nothing and so could lie in host memory; else 0."""
    table = model.embeddings
    return 0 if table is None or table is model.head else sum(array.nbytes for array in arrays_of(table))
