"""Records that several kernels take: arrays that always travel together. They are unpacked only at `card.launch`."""

from typing import NamedTuple

import numpy as np

from kernels.card import Array, Card
from kernels.limits import CHECK_ROWS

HEAD = 128              # elements of a head of a linear-attention layer
VECTORS = 5             # in the record of a row and head
LISTED = 1024           # entries of a slot's list of tokens (kernels/draft_list.py)


class Projected(NamedTuple):
    """The products of a layer's input projections, side by side in a row per token; a kernel reads its own columns.

    values  float32, flat     row r begins at element r * stride
    """

    values: Array
    stride: int             # elements from a row to the next, at least the columns that are used

    def rows_from(self, start: int) -> "Projected":
        """The same products from row `start` on."""
        return Projected(self.values[start * self.stride:], self.stride)


class Places(NamedTuple):
    """Where each row of a pass belongs: int32 arrays, one element per row."""

    slots: Array
    positions: Array        # of the row's token in the sequence of its slot, from 0 on

    def rows_from(self, start: int) -> "Places":
        return Places(self.slots[start:], self.positions[start:])


class States(NamedTuple):
    """What linear-attention layers remember of their slots; of all layers of a card, or of one (`layer`).

    conv    float32 [n_layers, n_rows, 4, channels]         the last inputs of the convolution (kernels/conv.py)
    memory  float32 [n_layers, n_rows, n_v, 128, 128]       the states of the delta rule (kernels/gdn.py)

    Row s of a layer belongs to slot s; the rows after those of the slots hold checkpoints. The arrays of one layer
    have no first dimension.
    """

    conv: Array
    memory: Array

    def layer(self, index: int) -> "States":
        """The states of one layer, out of those of several."""
        return States(self.conv[index], self.memory[index])

    def copy(self, card: Card, to: int, source: int):
        """Row `to` <- row `source`, of the states of one layer."""
        card.copy(self.conv[to], self.conv[source])
        card.copy(self.memory[to], self.memory[source])


class Pending(NamedTuple):
    """What rows 1 to 7 of the latest check of each slot did to the states; of all linear-attention layers of a card, or
    of one (`layer`).

    A check brings the states of a slot past its row 0 only. Each later row leaves a record; the next check applies the
    records of the rows that were accepted (kernels/gdn_decode.py). A value head has records of its own, also of the q
    and k that it shares with others: so no block of threads writes what another may still read.

    accepted  int32 [n_slots]                                    how many of these rows count, 0 to 7
    vectors   float32 [n_layers, n_slots, 7, n_v, 5, 128]        inputs of the convolution for q, k and v; k; d
    keep      float32 [n_layers, n_slots, 7, n_v]                the decay g

    The arrays of one layer have no first dimension. `accepted` is the same for all layers.
    """

    accepted: Array
    vectors: Array
    keep: Array

    @classmethod
    def allocate(cls, card: Card, n_layers: int, n_slots: int, heads) -> "Pending":
        """Of n_layers layers with `heads` (kernels/gdn.py), with nothing pending."""
        shape = n_layers, n_slots, CHECK_ROWS - 1, heads.n_values
        return cls(card.zeros(n_slots, np.int32, "rows accepted"),
                   card.zeros((*shape, VECTORS, HEAD), np.float32, "pending rows of recurrent states"),
                   card.zeros(shape, np.float32, "pending decays of recurrent states"))

    @staticmethod
    def slot_bytes(heads) -> int:
        """Bytes of the records of a slot in one layer."""
        return 4 * (CHECK_ROWS - 1) * heads.n_values * (VECTORS * HEAD + 1)

    def layer(self, index: int) -> "Pending":
        """The pending records of one layer, out of those of several."""
        return Pending(self.accepted, self.vectors[index], self.keep[index])


class DraftHead(NamedTuple):
    """Which tokens the columns of the head for drafts are (kernels/draft_head.py).

    n_low       columns of the lowest ids
    skipped     ids between the lowest and the last ids of the vocabulary; the last ids have the next columns
    n_shared    columns of low and of last ids together; behind them, each slot's list has LISTED columns
    listed      int32 [n_slots, LISTED], the list of each slot, -1: no entry; None if no id is skipped
    n_listed    int32 [n_slots], how many entries each list has got; each takes the place of the oldest
    """

    n_low: int
    skipped: int
    n_shared: int
    listed: Array | None
    n_listed: Array | None

    @property
    def columns(self) -> int:
        return self.n_shared + LISTED * (self.listed is not None)


class Choice(NamedTuple):
    """Which experts a layer's router has chosen for each row, in the order of rank: the likeliest first. Row i has the
    pairs i * n_used to (i + 1) * n_used - 1 of (row, expert).

    experts  int32 [rows, n_used]
    weights  float32 [rows, n_used + 1]     of the experts' results, and of the shared expert's
    """

    experts: Array
    weights: Array

    @property
    def n_used(self) -> int:
        return self.experts.shape[1]


class Groups(NamedTuple):
    """The pairs of a Choice, sorted by expert, in tiles for products (kernels/route.py). Pairs of one expert keep the
    order of their numbers.

    order     int32 [pairs]           sorted position -> pair
    position  int32 [pairs]           pair -> sorted position
    tiles     int32 [most tiles, 3]   expert, first sorted position, how many positions: 1 or more, all of this expert
    n_tiles   int32 [1]               how many tiles there are; what stands behind them has no meaning
    """

    order: Array
    position: Array
    tiles: Array
    n_tiles: Array
