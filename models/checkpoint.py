"""Checkpoints of a training run: a network, its tower, its tokenizer, and what it takes to go on training.

A checkpoint on the disk is a folder of files of at most 16 MB: part-0.safetensors, part-1.safetensors, ...,
tokenizer.json and state.json.
"""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import tokenizers

from models.network import Network, Shape
from models.tower import Tower, TowerShape

PART_BYTES = 15_000_000      # of a checkpoint's file


@dataclasses.dataclass
class Checkpoint:
    """The state of a training run after `step` steps."""
    network: Network
    tokenizer: tokenizers.Tokenizer
    seed: int
    step: int = 0
    minutes: float = 0.0                                       # of training
    history: list = dataclasses.field(default_factory=list)    # points as `train` makes them
    optimizer: dict = dataclasses.field(default_factory=dict)  # Optimizer.tensors()
    tower: Tower | None = None                                 # a network that is blind has none


def save_checkpoint(folder: str | Path, checkpoint: Checkpoint):
    """Writes a checkpoint into `folder`.

    Weights are kept as float16 and the optimisers' averages as bfloat16, which halves the size. Rounding changes them
    by far less than a few steps of training do.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"network.{name}": p.detach().half() for name, p in checkpoint.network.named_parameters()}
    if checkpoint.tower is not None:
        tensors |= {f"tower.{name}": p.detach().half() for name, p in checkpoint.tower.named_parameters()}
    tensors |= {f"optimizer.{name}": t.bfloat16() for name, t in checkpoint.optimizer.items()}
    parts, size = [{}], 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > PART_BYTES:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor.cpu().contiguous()
    for i, part in enumerate(parts):
        safetensors.torch.save_file(part, folder / f"part-{i}.safetensors")
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    state = {"shape": dataclasses.asdict(checkpoint.network.shape), "parts": len(parts),
             "seed": checkpoint.seed, "step": checkpoint.step, "minutes": checkpoint.minutes,
             "history": checkpoint.history}
    if checkpoint.tower is not None:
        state["tower"] = dataclasses.asdict(checkpoint.tower.shape)
    (folder / "state.json").write_text(json.dumps(state))


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint that `save_checkpoint` wrote into `folder`."""
    folder = Path(folder)
    state = json.loads((folder / "state.json").read_text())
    tensors = {}
    for i in range(state["parts"]):
        tensors |= safetensors.torch.load_file(folder / f"part-{i}.safetensors")
    network = Network(Shape(**state["shape"]))
    network.load_parameters(_starting(tensors, "network."))
    tower = None
    if "tower" in state:
        tower = Tower(TowerShape(**state["tower"]))
        tower.load_state_dict(_starting(tensors, "tower."))
    optimizer = _starting(tensors, "optimizer.")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Checkpoint(network, tokenizer, state["seed"], state["step"], state["minutes"], state["history"],
                      optimizer, tower)


def _starting(tensors: dict, prefix: str) -> dict:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
