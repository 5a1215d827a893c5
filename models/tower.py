"""The vision tower of `qwen3vl_merger` files in plain PyTorch, for training: the mathematics of engine/vision.py.

    patches ── patch_embd ── + positions ── blocks ── post_ln ── 4 patches side by side ── mm.0, GELU, mm.2 ── rows

    block:  x += attn_out(attention(rotated qkv(ln1(x))))          x += ffn_down(gelu(ffn_up(ln2(x))))

Parameters are named and shaped as the file's tensors. Only `v.patch_embd.weight` differs: the file has one kernel for
each of two moments of a video, and a picture is the same at both, so that only their sum is trained.

Pictures of any sizes are packed in rows, as documents are. `grid` int [R, P, 5] says all about a patch: its row and
column, the rows and columns of patches that its picture has, and the number of its picture in the row. A picture's
patches come block after block of 2 x 2, as in kernels/patches.py; each block becomes one row of the result.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from models.network import attend, block_mask_of, turn

PATCH_VALUES = 3 * 16 * 16
MERGED = 4              # patches of a block
ROPE_BASE = 1e4


@dataclasses.dataclass(frozen=True)
class TowerShape:
    """The sizes of a tower; by default those of qengine-10m's."""

    width: int = 192
    n_blocks: int = 6
    n_heads: int = 3
    ffn: int = 768
    side: int = 16          # the table of positions has side x side rows
    hidden: int = 256       # of the text network, and of the rows that the tower makes
    norm_eps: float = 1e-6


class TowerBlock(nn.Module):
    def __init__(self, shape: TowerShape):
        super().__init__()
        self.n_heads = shape.n_heads
        self.ln1, self.ln2 = (nn.LayerNorm(shape.width, shape.norm_eps) for _ in range(2))
        self.attn_qkv = nn.Linear(shape.width, 3 * shape.width)
        self.attn_out = nn.Linear(shape.width, shape.width)
        self.ffn_up = nn.Linear(shape.width, shape.ffn)
        self.ffn_down = nn.Linear(shape.ffn, shape.width)

    def forward(self, x, grid, mask):
        """x [R, P, width]; mask: as for `attend`."""
        q, k, v = self.attn_qkv(self.ln1(x)).unflatten(2, (3, self.n_heads, -1)).unbind(2)
        q, k = (rotate_patches(each, grid).to(v.dtype) for each in (q, k))
        o = attend(*(each.transpose(1, 2) for each in (q, k, v)), mask).transpose(1, 2)
        x = x + self.attn_out(o.flatten(2))
        return x + self.ffn_down(F.gelu(self.ffn_up(self.ln2(x)), approximate="tanh"))


def rotate_patches(x: Tensor, grid: Tensor) -> Tensor:
    """Rotary embedding of x [R, P, heads, d], pairs (i, i + d / 2): the first d / 4 by the patch's row, the others,
    with the same frequencies, by its column."""
    quarter = x.shape[3] // 4
    frequency = ROPE_BASE ** (-torch.arange(quarter, device=x.device, dtype=torch.float32) / quarter)
    return turn(x.float(), (grid[..., :2, None].float() * frequency).flatten(2))


def positions(table: Tensor, grid: Tensor) -> Tensor:
    """The table [side * side, width], stretched over each picture with its corners on the picture's: bilinear, which
    weighs a row of the table by 1 less its distance down times 1 less that across, where they are below 1."""
    side = math.isqrt(len(table))
    at = grid[..., :2] * (side - 1) / (grid[..., 2:4] - 1).clamp(min=1)
    distance = at[..., None] - torch.arange(side, device=grid.device)
    down, across = (1 - distance.abs()).clamp(min=0).unbind(2)
    return (down[..., None] * across[..., None, :]).flatten(2) @ table


def dense_picture_mask(grid: Tensor) -> Tensor:
    """bool [R, 1, P, P]: a patch sees those of its picture."""
    picture = grid[..., 4]
    return (picture[:, None] == picture[..., None])[:, None]


def block_picture_mask(grid: Tensor) -> BlockMask:
    """The same for `flex_attention`. The patches of a picture lie side by side."""
    picture = grid[..., 4]
    at = torch.arange(picture.shape[1], device=grid.device)
    changes = picture[:, 1:] != picture[:, :-1]
    first = torch.where(F.pad(changes, (1, 0), value=True), at, 0).cummax(1).values
    last = torch.where(F.pad(changes, (0, 1), value=True), at, len(at)).flip(1).cummin(1).values.flip(1)
    return block_mask_of(first, last)


class Tower(nn.Module):
    def __init__(self, shape: TowerShape):
        super().__init__()
        self.shape = shape
        self.v = nn.Module()
        self.v.patch_embd = nn.Linear(PATCH_VALUES, shape.width)
        self.v.position_embd = nn.Embedding(shape.side ** 2, shape.width)
        self.v.blk = nn.ModuleList(TowerBlock(shape) for _ in range(shape.n_blocks))
        self.v.post_ln = nn.LayerNorm(shape.width, shape.norm_eps)
        merged = MERGED * shape.width
        self.mm = nn.ModuleDict({"0": nn.Linear(merged, merged), "2": nn.Linear(merged, shape.hidden)})
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """As a network's: inputs by fan-in, a block's outputs zero, so that blocks are the identity at first."""
        for name, parameter in self.named_parameters():
            if name.endswith(("ffn_down.weight", "attn_out.weight")) or name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)

    def forward(self, patches, grid, mask=None) -> Tensor:
        """float [R, P / 4, hidden] of the patches' pixels uint8 [R, P, 768], all of red, then green, then blue.
        mask: where it is not the one that is fastest for rows of many pictures."""
        if mask is None:
            mask = block_picture_mask(grid) if patches.is_cuda else dense_picture_mask(grid)
        x = self.v.patch_embd(patches.float() * (2 / 255) - 1).float()      # the residual stream is float32
        x = x + positions(self.v.position_embd.weight, grid)
        for block in self.v.blk:
            x = block(x, grid, mask)
        merged = self.v.post_ln(x).unflatten(1, (-1, MERGED)).flatten(2)
        return self.mm["2"](F.gelu(self.mm["0"](merged)))
