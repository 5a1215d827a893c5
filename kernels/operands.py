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


@dataclass(frozen=True)
class Experts:
    """The same weight matrix [n, k] of each of several experts.

    `places` says where each expert's matrix is: uint64 [n_experts, 2], the global addresses of its codes and of its
    scales, which lie as those of a Matrix do; of a matrix of floats the second is 0. An address is in the memory of the
    card, or in host memory that the card can read. (0, 0): out of the card's reach; kernels leave such an expert's
    results as they are.

    home: the Matrix [slots * n, k] on the card, one expert behind the other, to which places point.
    """

    home: Matrix
    n: int                  # rows of each expert
    places: Array

    @property
    def format(self) -> str:
        return self.home.format

    @property
    def k(self) -> int:
        return self.home.k

    @property
    def is_quantized(self) -> bool:
        return self.home.is_quantized

    def slot(self, number: int) -> Matrix:
        """The matrix that lies in one slot of the home."""
        return self.home.rows(number * self.n, (number + 1) * self.n)

    def addresses(self, number: int) -> tuple[int, int]:
        """What `places` says of an expert in this slot."""
        matrix = self.slot(number)
        return matrix.values.ptr, matrix.scales.ptr if matrix.is_quantized else 0


class Quantized(NamedTuple):
    """Rows of activations as int8 blocks (kernels/quantize.py). Quantising kernels write them, products read them."""

    q: Array                # int8 [rows, k]
    d: Array                # float32 [rows, k / 32]: the scale of each block of 32

    @property
    def flat(self) -> tuple[Array, Array]:
        """Both in one dimension, as kernels take them."""
        return self.q.reshape(-1), self.d.reshape(-1)
