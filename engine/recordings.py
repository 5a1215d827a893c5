"""The recordings of a stage's decode steps: made when they are first asked for, and not too many of them."""

from kernels.card import Card, Recording

MOST_RECORDINGS = 128       # each takes host memory, and steps come in many shapes


class Recordings:
    """Name and arguments of a launch -> its Recording, in the order in which they were used last."""

    def __init__(self, card: Card):
        self.card, self.made = card, {}

    def __len__(self):
        return len(self.made)

    def of(self, launch, *arguments) -> Recording:
        """The Recording of launch(*arguments), a method of the stage. If there are too many, a quarter of them goes:
        those used least lately, when the card has done what it replays."""
        key = launch.__name__, *arguments
        recording = self.made.pop(key, None)
        if recording is None and len(self.made) >= MOST_RECORDINGS:
            self.card.synchronize()
            for oldest in list(self.made)[:-(-MOST_RECORDINGS // 4)]:
                del self.made[oldest]
        if recording is None:
            with self.card.record(" ".join(map(str, key))) as recording:
                launch(*arguments)
        self.made[key] = recording              # behind the others
        return recording

    def clear(self):
        """Forget all."""
        self.made.clear()
