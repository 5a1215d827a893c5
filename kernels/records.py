"""Records that several kernels take: arrays that always travel together. They are unpacked only at `card.launch`."""

from typing import NamedTuple

from kernels.card import Array, Card

CHECK_ROWS = 8              # most rows of an answer in a decode step: its latest token and up to 7 drafts

LISTED = 1024               # entries of a slot's list of tokens (kernels/draft_list.py)


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
        """The states of one layer, of those of several."""
        return States(self.conv[index], self.memory[index])

    def copy(self, card: Card, to: int, source: int):
        """Row `to` <- row `source`, of the states of one layer."""
        card.copy(self.conv[to], self.conv[source])
        card.copy(self.memory[to], self.memory[source])


class DraftHead(NamedTuple):
    """Which tokens the columns of the head for drafts are (kernels/draft_head.py).

    n_low       columns of the lowest ids
    skipped     ids between those and the last ones of the vocabulary, which have the next columns
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
