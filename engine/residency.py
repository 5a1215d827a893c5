"""Which experts of each layer have a slot on the card, and which one gives way to an expert that is missing there.

A score says how often and how lately an expert was used: each decode step that uses it adds 1, and what was added
fades to a half in HALF_LIFE steps. Of the experts that have the slots of a layer, the one with the lowest score gives
way, and only to an expert with a higher score. So an expert that one token needed does not push out one that many
tokens need, and the experts of a topic go soon after the topic.

    HALF_LIFE → 0     the least recently used expert gives way
    HALF_LIFE → ∞     the least frequently used one

This is the LRFU rule (Lee et al., IEEE Transactions on Computers 50(12), 2001). tests/test_residency.py compares it
with others on made-up traces: as many hits as the least-recently-used rule has, with fewer copies to the card.

All of this is arithmetic on the host. Where an expert lies changes no bit of a result.
"""

from typing import NamedTuple

import numpy as np

HALF_LIFE = 32              # steps
LARGEST_GAIN = 1e100        # what a use may add before all scores are scaled down
NOWHERE = -1                # in `slot_of`: the expert has no slot that may be read


class Move(NamedTuple):
    """An expert that shall get a slot of its layer. leaving: the expert that had the slot."""

    layer: int
    expert: int
    slot: int
    leaving: int


class Residency:
    """The experts of n_layers layers, n_experts each, and n_slots slots in each layer. At first, the experts with the
    lowest numbers have the slots.

    slot_of  int32 [n_layers, n_experts]    the slot of each expert, or NOWHERE
    owner    int32 [n_layers, n_slots]      the expert that has each slot, or that is on its way there
    """

    def __init__(self, n_layers: int, n_experts: int, n_slots: int, half_life: float = HALF_LIFE):
        self.slot_of = np.full((n_layers, n_experts), NOWHERE, np.int32)
        self.owner = np.tile(np.arange(min(n_slots, n_experts), dtype=np.int32), (n_layers, 1))
        self.slot_of[:, :self.n_slots] = self.owner
        self.score = np.zeros((n_layers, n_experts))    # all of them times one factor, which grows
        self.is_coming = np.zeros((n_layers, n_experts), bool)      # the slot is reserved, the expert not there yet
        # Later uses add more, instead of earlier ones fading: that costs nothing for experts that are not used.
        self._gain, self._growth = 1.0, 2.0 ** (1 / half_life)
        self._layers = np.arange(n_layers)[:, None]

    @property
    def n_slots(self) -> int:
        return self.owner.shape[1]

    def use(self, chosen: np.ndarray) -> tuple[np.ndarray, int]:
        """Counts a decode step. chosen: int [n_layers, pairs], the experts that its rows have used.

        Returns the experts that were used without a slot, [n, 2] of (layer, expert), each once and the one with the
        highest score first; and how many of the pairs they had.
        """
        at = self._layers, chosen
        self.score[at] += self._gain                    # once for a step, however many of its rows use the expert
        self._gain *= self._growth
        if self._gain > LARGEST_GAIN:
            self.score /= self._gain
            self._gain = 1.0
        layer, pair = np.nonzero(self.slot_of[at] == NOWHERE)
        if not layer.size:
            return np.empty((0, 2), np.int64), 0
        n_experts = self.slot_of.shape[1]
        missing = np.unique(layer * n_experts + chosen[layer, pair])
        missing = missing[np.argsort(-self.score.reshape(-1)[missing], kind="stable")]
        return np.stack(np.divmod(missing, n_experts), axis=1), layer.size

    def make_way(self, layer: int, expert: int) -> Move | None:
        """Reserves a slot for an expert that has none. The expert that leaves has no slot from now on; the new one has
        it after `settle`. None: the new one is on its way already, or those that have the slots are worth more."""
        if self.is_coming[layer, expert] or not self.n_slots:
            return None
        owner = self.owner[layer]
        scores = np.where(self.is_coming[layer, owner], np.inf, self.score[layer, owner])
        slot = int(scores.argmin())
        if scores[slot] >= self.score[layer, expert]:
            return None
        move = Move(int(layer), int(expert), slot, int(owner[slot]))
        self.slot_of[layer, move.leaving] = NOWHERE
        owner[slot], self.is_coming[layer, expert] = expert, True
        return move

    def settle(self, move: Move):
        """The expert of a Move is in its slot."""
        self.slot_of[move.layer, move.expert] = move.slot
        self.is_coming[move.layer, move.expert] = False
