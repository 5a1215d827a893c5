"""Checkpoints of a training run: a network, its tower, its tokenizer, and what it takes to go on training.

A checkpoint on the disk is a folder of files of at most 16 MB: part-0.safetensors, part-1.safetensors, ...,
tokenizer.json and state.json, and those of the optimisers, without which training goes on with a warm up.
"""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import tokenizers

from models.lessons import Lessons
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
    tower: Tower | None = None                                 # a network that is blind has none,
    lessons: Lessons | None = None                             # nor lessons


def save_checkpoint(folder: str | Path, checkpoint: Checkpoint):
    """Writes a checkpoint into `folder`.

    Weights are kept as float16 and the optimisers' averages as bfloat16, which halves the size. Rounding changes them
    by far less than a few steps of training do.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"network.{name}": p.detach().half() for name, p in checkpoint.network.named_parameters()}
    for kind in ("tower", "lessons"):
        if (module := getattr(checkpoint, kind)) is not None:
            tensors |= {f"{kind}.{name}": p.detach().half() for name, p in module.named_parameters()}
    _save(folder, "part", tensors)
    _save(folder, "optimizer", {name: t.bfloat16() for name, t in checkpoint.optimizer.items()})
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    state = {"shape": dataclasses.asdict(checkpoint.network.shape), "seed": checkpoint.seed,
             "step": checkpoint.step, "minutes": checkpoint.minutes,
             "history": checkpoint.history}
    if checkpoint.tower is not None:
        state["tower"] = dataclasses.asdict(checkpoint.tower.shape)
    (folder / "state.json").write_text(json.dumps(state))


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint that `save_checkpoint` wrote into `folder`."""
    folder = Path(folder)
    state = json.loads((folder / "state.json").read_text())
    tensors = {}
    for path in folder.glob("part-*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    optimizer = {}
    for path in folder.glob("optimizer-*.safetensors"):
        optimizer |= safetensors.torch.load_file(path)
    network = Network(Shape(**state["shape"]))
    network.load_parameters(_starting(tensors, "network."))
    tower = lessons = None
    if "tower" in state:
        tower, lessons = Tower(TowerShape(**state["tower"])), Lessons(network.shape.hidden)
        tower.load_state_dict(_starting(tensors, "tower."))
        lessons.load_state_dict(_starting(tensors, "lessons."))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Checkpoint(network, tokenizer, state["seed"], state["step"], state["minutes"], state["history"],
                      optimizer, tower, lessons)


def _save(folder: Path, name: str, tensors: dict):
    """In files NAME-0, NAME-1, ...; former ones go."""
    for path in folder.glob(f"{name}-*.safetensors"):
        path.unlink()
    parts, size = [{}], 0
    for key, tensor in tensors.items():
        size += tensor.nbytes
        if size > PART_BYTES:
            parts.append({})
            size = tensor.nbytes
        parts[-1][key] = tensor.cpu().contiguous()
    for i, part in enumerate(parts):
        safetensors.torch.save_file(part, folder / f"{name}-{i}.safetensors")


def _starting(tensors: dict, prefix: str) -> dict:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
