"""The scratch memory of a pass through the layers of a card, and the activations that enter projections."""

from typing import NamedTuple

import numpy as np

from kernels.card import Array
from kernels.operands import Quantized


class ScratchArray(NamedTuple):
    """An array of a pass's scratch memory. Its first extent is proportional to the rows that a pass may have."""

    shape: tuple[int, ...]
    dtype: type
    title: str              # for people


class Activation:
    """Input rows of products, k values each. Quantised matrices read (q, d): int8, and a float32 scale for each 32
    values. Other matrices read x: float32."""

    def __init__(self, k: int, x: Array, q: Array, d: Array):
        self.k, self.x, self.q, self.d = k, x, q, d

    @property
    def quantized(self) -> Quantized:
        """The form that products with quantised matrices read."""
        return Quantized(self.q, self.d)

    @staticmethod
    def layout(name: str, k: int, rows: int) -> dict[str, ScratchArray]:
        """The three arrays, by the names "NAME x", "NAME q" and "NAME d"."""
        return {f"{name} x": ScratchArray((rows, k), np.float32, f"activation {k}"),
                f"{name} q": ScratchArray((rows, k), np.int8, f"activation {k} quants"),
                f"{name} d": ScratchArray((rows, k // 32), np.float32, f"activation {k} scales")}


class Scratch:
    """The scratch memory of a pass. Each array is an attribute, whose name says what the array holds while a layer
    runs.

    x           the residual stream, float32 [rows, hidden]
    projected   products of a stack, float32, flat: rows are `Stack.stride` apart
    activations width -> Activation: what enters a stack (hidden), or the `out_proj` of a mixer
    inner       Activation: what enters the `down` of an MLP
    and the arrays and Activations that kinds of mixers and MLPs name in their `scratch`.
    """

    def __init__(self, arrays: dict[str, Array]):
        """arrays: by the names of `Model.scratch_layout`."""
        self.arrays, self.activations = arrays, {}
        for name, array in arrays.items():
            kind, _, form = name.partition(" ")
            if form == "x":
                activation = Activation(array.shape[1], array, arrays[f"{kind} q"], arrays[f"{kind} d"])
                if kind.isdigit():
                    self.activations[activation.k] = activation
                else:
                    setattr(self, kind, activation)
            elif not form:
                setattr(self, name, array)

    def behind(self, skipped: dict[str, ScratchArray]) -> "Scratch":
        """The same memory from a later row on. skipped: `Model.scratch_layout` of the rows before it, a multiple of 64
        rows."""
        return Scratch({name: array[skipped[name].shape[0]:] for name, array in self.arrays.items()})
