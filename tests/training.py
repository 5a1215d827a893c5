"""What the tests of the training code share. Only they import PyTorch."""

import torch

# A process's first exp by several threads at once can be inexact: github.com/pytorch/pytorch/issues/188792.
torch.set_num_threads(1)


def relative(ours, reference) -> float:
    """Relative L2 distance."""
    ours, reference = (torch.as_tensor(x).detach().double() for x in (ours, reference))
    return ((ours - reference).norm() / reference.norm()).item()


def assert_same_mask(mask, dense):
    """A BlockMask says of each query and key what dense, bool [B, 1, T, T], says; of the blocks that it does not list
    nothing is seen, and of those that it lists as whole all."""
    batch, length, size = len(dense), dense.shape[2], mask.BLOCK_SIZE[0]
    b, i, j = torch.arange(batch)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    assert torch.equal(mask.mask_mod(b, 0, i, j), dense[:, 0])
    blocks = dense.unflatten(3, (-1, size)).unflatten(2, (-1, size))        # [B, 1, n, size, n, size]

    def listed(counts, indices):
        rank = torch.arange(indices.shape[3])
        return torch.zeros(indices.shape, dtype=torch.bool).scatter(3, indices.long(), rank < counts[..., None])
    partly, whole = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partly & whole).any()
    assert not (blocks.any(5).any(3) & ~partly & ~whole).any()
    assert torch.equal(whole, blocks.all(5).all(3))
