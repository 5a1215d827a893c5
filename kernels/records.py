"""Records that several kernels take: arrays that always travel together. They are unpacked only at `card.launch`."""

from typing import NamedTuple

from kernels.card import Array, Card

CHECK_ROWS = 8              # most rows of an answer in a decode step: its latest token and up to 7 drafts


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
