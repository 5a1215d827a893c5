"""Lessons for a tower: it tells what each block of a picture shows, by the labels of tasks/pictures/labels.py.

Questions alone teach a tower little: an answer of a few tokens says hardly anything about where in a picture something
is. Labels say it for each block. A linear layer tells each fact from the row that the tower makes of a block, so that
the text network, which starts with linear layers, finds it there. The layer serves for training alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.tasks.pictures.labels import FACTS, NOTHING, SIZES, UNUSED

NOTHING_WEIGHT = 0.05        # of a block that shows nothing of a fact, in the loss
LENGTH_WEIGHT = 0.1         # of the error of the rows' length
_OF_ONE_SIZE = [[i for i, size in enumerate(SIZES) if size == one] for one in sorted(set(SIZES))]     # facts, by number


class Lessons(nn.Module):
    """length: the root mean square that rows are to have, which is that of the network's other inputs."""

    def __init__(self, hidden: int, length: float = 1.0):
        super().__init__()
        self.told, self.length = nn.Linear(hidden, sum(SIZES)), length

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss of rows [..., hidden] with labels int [..., facts]: cross entropy and the error of their length."""
        used = (labels[..., :1] != UNUSED).float()
        lengths = rows.float().square().mean(-1, keepdim=True).add(1e-6).sqrt()
        error = ((lengths / self.length - 1).square() * used).sum() / used.sum().clamp(min=1)
        return _label_loss(self.tell(rows), labels.flatten(0, -2)) + LENGTH_WEIGHT * error

    def tell(self, rows: Tensor) -> Tensor:
        """Logits [n, sum of SIZES]; how long a row is makes no difference."""
        return self.told(F.rms_norm(rows.float(), rows.shape[-1:])).flatten(0, -2)

    @torch.no_grad()
    def right(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Of each fact, how many blocks that show something are told right, and how many there are: [facts, 2]."""
        told = torch.stack([part.argmax(1) for part in self.tell(rows).split(SIZES, 1)], 1)
        labels = labels.flatten(0, -2)
        shown = labels > NOTHING
        return torch.stack([((told == labels) & shown).sum(0), shown.sum(0)], 1)


def _label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [n, sum of SIZES] over all facts and blocks. Facts of one size are one tensor: with
    a loss for each fact, there would be some hundred kernels to launch, or to compile."""
    parts, columns, total, weight = logits.float().split(SIZES, 1), labels.unbind(1), 0, 0
    for same in _OF_ONE_SIZE:
        some, right = (torch.stack([each[i] for i in same], 1).flatten(0, 1) for each in (parts, columns))
        weights = torch.where(right > NOTHING, 1.0, NOTHING_WEIGHT * (right == NOTHING))
        total = total + (F.cross_entropy(some, right.clamp(min=0), reduction="none") * weights).sum()
        weight = weight + weights.sum()
    return total / weight.clamp(min=1)


def show_facts(right: list) -> str:
    """Shares of `right`, in per cent."""
    return " ".join(f"{fact} {100 * good / n:.0f}" for fact, (good, n) in zip(FACTS, right) if n)
