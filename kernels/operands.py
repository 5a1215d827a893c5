"""What matrix products read: a matrix of weights on a card, and activations as int8 blocks."""

from dataclasses import dataclass
from typing import NamedTuple

from kernels.card import Array


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n, k] on a card.

    In a format of kernels/formats, `values` has the codes of the weights and `scales` their scales: two arrays with
    a line for each row. Otherwise `values` is float32, float16 or uint16 (the bits of bfloat16) [n, k], and there are
    no scales.
    """

    format: str             # as GGUF has it: "Q8_0", "F16", ...
    n: int
    k: int
    values: Array
    scales: Array | None = None

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None

    def rows(self, start: int, stop: int) -> "Matrix":
        """Rows start .. stop - 1, in the same memory."""
        scales = None if self.scales is None else self.scales[start:stop]
        return Matrix(self.format, stop - start, self.k, self.values[start:stop], scales)


class Quantized(NamedTuple):
    """Rows of activations as int8 blocks (kernels/quantize.py). Products read them; what quantises writes them."""

    q: Array                # int8 [rows, k]
    d: Array                # float32 [rows, k / 32]: the scale of each block of 32
