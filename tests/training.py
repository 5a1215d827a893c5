"""What the tests of the training code share. Only they import PyTorch."""

import torch

# A process's first exp by several threads at once can be inexact: github.com/pytorch/pytorch/issues/188792.
torch.set_num_threads(1)


def relative(ours, reference) -> float:
    """Relative L2 distance."""
    ours, reference = (torch.as_tensor(x).detach().double() for x in (ours, reference))
    return ((ours - reference).norm() / reference.norm()).item()
