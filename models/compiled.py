"""What is compiled for training on a card, and how a later part of a run finds it done.

Three kinds of blocks and the head's loss are compiled, each once: all blocks of a kind have one shape of rows in a
phase, and share what was compiled. Everything else is few calls. A block's kernels are the first ones that the
compiler thinks of: to time several of each takes longer than a short run gains by it.

What one part of a run has compiled lies in a file, and another part that is given this file begins with it. PyTorch
writes pickles there, and reading a pickle can run any program. So the file is not part of a checkpoint, because a
checkpoint can come from anyone: the person who trains names the file.
"""

import os
from pathlib import Path

import torch

from models.checkpoint import Checkpoint

OPTIONS = {"triton.autotune_pointwise": False}


def compile_blocks(checkpoint: Checkpoint):
    """To be compiled when they first run."""
    for block in (*checkpoint.network.blk, *checkpoint.tower.v.blk):
        block.compile(dynamic=False, options=OPTIONS)
    checkpoint.network.head_loss = torch.compile(checkpoint.network.head_loss, dynamic=False, options=OPTIONS)


def keep(file: str | Path):
    """Writes into a file what this process has compiled, or found there. A process that is killed leaves the former
    file whole."""
    if artifacts := torch.compiler.save_cache_artifacts():
        Path(f"{file}.new").write_bytes(artifacts[0])
        os.replace(f"{file}.new", file)


def find(file: str | Path):
    """Makes what lies in a file known to this process's compiler; nothing if it is not there yet. Runs whatever the
    file says: only for one's own."""
    if Path(file).exists():
        torch.compiler.load_cache_artifacts(Path(file).read_bytes())
