"""What is known of a model beside the numbers that the engine computes with: for people, and for clients that list
models."""

import collections
import math
import os
import time
from dataclasses import dataclass

from engine.gguf import GGML_TYPES

BLOCKS = {name: (block, n_bytes) for name, block, n_bytes in GGML_TYPES.values()}


def parameters(shapes: dict[str, tuple[int, ...]], config) -> str:
    """For people: how many parameters a model has; of a mixture of experts also how many a token uses, without draft
    blocks, as in names of models. shapes: of its tensors; those of experts have three dimensions."""
    found = f"{sum(map(math.prod, shapes.values())) / 1e6:,.1f} million parameters"
    if not config.n_experts:
        return found
    share, n_all, n_active = config.n_used_experts / config.n_experts, 0, 0.0
    for name, shape in shapes.items():
        if not name.startswith("blk.") or int(name.split(".")[1]) < config.n_layers:
            n_all += math.prod(shape)
            n_active += math.prod(shape) * (share if len(shape) == 3 else 1)
    return f"{found} ({show_count(n_all)}, {show_count(n_active)} active)"


def show_count(n: float) -> str:
    """As names of models have it: "35B", "3B", "12M"."""
    value, unit = (n / 1e9, "B") if n >= 1e9 else (n / 1e6, "M")
    return f"{value:.0f}{unit}"


@dataclass(frozen=True)
class ModelDetails:
    """metadata: the keys of the model's file that hold one number, truth value or text. Random weights have only
    "general.architecture"."""

    metadata: dict[str, int | float | bool | str]
    n_parameters: int       # of all tensors
    n_bytes: int            # of all tensors, as the file stores them
    format: str             # the type in which most of the weights are, "Q8_0"
    modified: float         # Unix time: when the file was changed; for random weights, now

    @classmethod
    def of(cls, weights) -> "ModelDetails":
        """weights: has `shapes` and `type_of` of tensors, and the file `gguf`; this is None if they are random, and
        then weights has the `architecture`. Vectors count as float32, as files have them."""
        gguf, n_weights = weights.gguf, collections.Counter()       # by type
        for name, shape in weights.shapes.items():
            n_weights[weights.type_of(name) if len(shape) > 1 else "F32"] += math.prod(shape)
        n_bytes = sum(n // BLOCKS[type][0] * BLOCKS[type][1] for type, n in n_weights.items())
        metadata = {"general.architecture": weights.architecture} if gguf is None else {
            key: value for key, value in gguf.metadata.items() if isinstance(value, int | float | str)}
        return cls(metadata, n_weights.total(), n_bytes, n_weights.most_common(1)[0][0],
                   time.time() if gguf is None else os.path.getmtime(gguf.path))
