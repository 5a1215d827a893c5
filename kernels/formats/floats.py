"""Weights that are stored as floats."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Float:
    """A type whose weights are stored as floats."""

    name: str
    number: int         # of the type in a GGUF file
    dtype: type         # of the arrays that hold it; uint16 for the bits of bfloat16, which NumPy lacks
    exponent: int       # the bits of the exponent: all of them are set in infinities and NaN
    file_block: int = 1

    @property
    def file_bytes(self):
        """Bytes of a weight."""
        return np.dtype(self.dtype).itemsize

    def widen(self, stored):
        """An array of `dtype` -> the same numbers as float32."""
        return (stored.astype(np.uint32) << 16).view(np.float32) if self.dtype == np.uint16 else \
            stored.astype(np.float32)


FLOATS = {kind.name: kind for kind in (
    Float("F32", 0, np.float32, 0x7F800000),
    Float("F16", 1, np.float16, 0x7C00),
    Float("BF16", 30, np.uint16, 0x7F80),
)}
EXPONENT = FLOATS["F16"].exponent  # of a scale
