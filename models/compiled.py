"""What is compiled for training on a card, and how a later part of a run finds it done.

Three kinds of blocks and the head's loss are compiled, each once: all blocks of a kind have one shape of rows in a
phase, and share what was compiled. Everything else is few calls. A block's kernels are the first ones that the
compiler thinks of: to time several of each takes longer than a short run gains by it.

What a first part of a run has compiled lies in its checkpoint's folder, and the next part begins with it.
"""

from pathlib import Path

import torch

from models.checkpoint import Checkpoint

FILE = "compiled.bin"
OPTIONS = {"triton.autotune_pointwise": False}


def compile_blocks(checkpoint: Checkpoint):
    """To be compiled when they first run."""
    for block in (*checkpoint.network.blk, *checkpoint.tower.v.blk):
        block.compile(dynamic=False, options=OPTIONS)
    checkpoint.network.head_loss = torch.compile(checkpoint.network.head_loss, dynamic=False, options=OPTIONS)


def keep(folder: str | Path):
    """Writes into a checkpoint's folder what this process has compiled, or found there."""
    if artifacts := torch.compiler.save_cache_artifacts():
        (Path(folder) / FILE).write_bytes(artifacts[0])


def find(folder: str | Path):
    """Makes what lies in a checkpoint's folder known to this process's compiler."""
    if (file := Path(folder) / FILE).exists():
        torch.compiler.load_cache_artifacts(file.read_bytes())
