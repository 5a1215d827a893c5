"""Checkpoints of a training run: a network, its tower, its tokenizer, and what it takes to go on training.

A checkpoint on the disk is a folder of files of at most 16 MB: part-STEP-0.safetensors, part-STEP-1.safetensors, ...,
optimizer-STEP-0.safetensors, ..., tokenizer.json and state.json. state.json names the others. It is written last and
takes the place of the former one at once, and only then do the former files go: a run that is killed while it saves
leaves the former checkpoint whole. Without the files of the optimisers training goes on with a warm up.
"""

import dataclasses
import json
import os
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
    files = _in_files(f"part-{checkpoint.step}", tensors)
    files |= _in_files(f"optimizer-{checkpoint.step}", {name: t.bfloat16() for name, t in checkpoint.optimizer.items()})
    state = {"shape": dataclasses.asdict(checkpoint.network.shape), "seed": checkpoint.seed,
             "step": checkpoint.step, "minutes": checkpoint.minutes,
             "history": checkpoint.history, "files": list(files)}
    if checkpoint.tower is not None:
        state["tower"] = dataclasses.asdict(checkpoint.tower.shape)
    files["tokenizer.json"] = checkpoint.tokenizer.to_str(pretty=False).encode()
    for name, content in (files | {"state.json": json.dumps(state).encode()}).items():
        (folder / f"{name}.new").write_bytes(content)
        os.replace(folder / f"{name}.new", folder / name)
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.new")):
        if path.name not in files:
            path.unlink()


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint that `save_checkpoint` wrote into `folder`."""
    folder = Path(folder)
    state = json.loads((folder / "state.json").read_text())
    tensors, optimizer = {}, {}
    for name in state["files"]:
        if name.startswith("part"):
            tensors |= safetensors.torch.load_file(folder / name)
        elif (folder / name).exists():
            optimizer |= safetensors.torch.load_file(folder / name)
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


def _in_files(name: str, tensors: dict) -> dict[str, bytes]:
    """The contents of files NAME-0.safetensors, NAME-1.safetensors, ...: PART_BYTES at most, or one tensor, in each."""
    parts, size = [{}], 0
    for key, tensor in tensors.items():
        size += tensor.nbytes
        if size > PART_BYTES:
            parts.append({})
            size = tensor.nbytes
        parts[-1][key] = tensor.cpu().contiguous()
    return {f"{name}-{i}.safetensors": safetensors.torch.save(part) for i, part in enumerate(parts) if part}


def _starting(tensors: dict, prefix: str) -> dict:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
