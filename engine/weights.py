"""The tensors of a model: from a file, random, or for plans without values; and the Loaders that put them on a card.

    Weights       FileWeights     SyntheticWeights      what a model has, on no card yet
    Loader        FileLoader      SyntheticLoader       puts it on one card: `Weights.loading`
    Matrix, Stack                                       what it becomes there
"""

import contextlib
import itertools
import re
import zlib
from dataclasses import dataclass

import numpy as np

from engine.gguf import GGUF
from engine.request import ModelError
from kernels import finite, formats, quant_gemv, synthetic
from kernels.card import Array, Card
from kernels.formats import FLOATS, FORMATS
from kernels.operands import Matrix
from kernels.upload import PIECE, Feeder


def decoder_of(matrix: Matrix):
    """How the decode kernels read the format of a quantised matrix."""
    return quant_gemv.decoder(FORMATS[matrix.format])


def alloc_matrix(card: Card, format: str, n: int, k: int, name: str) -> Matrix:
    """A matrix of undefined values. Raises OutOfMemory."""
    if format in FLOATS:
        return Matrix(format, n, k, card.alloc((n, k), FLOATS[format].dtype, name))
    values, scales = FORMATS[format].arrays(n, k)
    return Matrix(format, n, k, card.alloc(*values, name), card.alloc(*scales, f"{name} scales"))


@dataclass(frozen=True)
class Stack:
    """Matrices that read the same input. Their products of one input row lie side by side, those of the next row begin
    `stride` numbers later."""

    parts: tuple[tuple[int, Matrix], ...]   # (first column, Matrix); successive tensors of one type are one Matrix
    stride: int                             # all columns together; for a layer rounded up to a multiple of 4


class Loader:
    """Puts tensors on a card. This class only allocates them, which suffices for plans of memory (engine/plan.py);
    subclasses fill in values.

    shapes: name -> row-major shape of every tensor. type_of(name): the tensor's type, as GGUF has it.
    """

    def __init__(self, card: Card, shapes: dict[str, tuple[int, ...]], type_of):
        self.card, self.shapes, self.type_of = card, shapes, type_of

    def matrix(self, *names: str) -> Matrix:
        """A Matrix of one tensor, or of several tensors of one type and width, stacked row after row. Raises
        OutOfMemory."""
        format, k = self.type_of(names[0]), self.shapes[names[0]][1]
        assert all((self.type_of(name), self.shapes[name][1]) == (format, k) for name in names)
        ends = list(itertools.accumulate(self.shapes[name][0] for name in names))
        matrix = alloc_matrix(self.card, format, ends[-1], k, " + ".join(names))
        for name, end in zip(names, ends):
            self.fill(matrix.rows(end - self.shapes[name][0], end), name)
        return matrix

    def stack(self, *names: str) -> Stack:
        """A Stack of tensors of one width that read the same input, in this order."""
        parts, column = [], 0
        for _, group in itertools.groupby(names, self.type_of):
            matrix = self.matrix(*group)
            parts.append((column, matrix))
            column += matrix.n
        return Stack(tuple(parts), column + -column % 4)

    def fill(self, rows: Matrix, name: str):
        """Give the rows of a matrix the values of a tensor."""

    def vector(self, name: str) -> Array:
        """A norm weight, a bias or another small tensor, as float32 in its own shape."""
        return self.card.alloc(self.shapes[name], np.float32, name)


class FileLoader(Loader):
    """Puts the tensors of a GGUF file on a card. Once all are there, `check` raises an error if the file is damaged."""

    def __init__(self, card: Card, weights: "FileWeights"):
        super().__init__(card, weights.shapes, weights.type_of)
        self.gguf, tensors = weights.gguf, weights.gguf.tensors
        self.feeder = Feeder(card, min(PIECE, max(tensor.nbytes for tensor in tensors.values())))
        self.flags = card.zeros(len(tensors), np.uint32, "flags of damaged tensors")
        self.flag_of = {name: self.flags[i:i + 1] for i, name in enumerate(tensors)}

    def fill(self, rows: Matrix, name: str):
        """Sends the bytes of a tensor to the card, where a kernel repacks them and looks for damage."""
        data, flag = self.gguf.data(name), self.flag_of[name]
        if rows.is_quantized:
            format = FORMATS[rows.format]
            for first, raw in self.feeder.pieces(data, format.file_bytes):
                formats.repack(self.card, format, rows.values, rows.scales, raw, flag, first, rows.k)
        else:
            to = rows.values.reshape(-1).view(np.uint8)
            for first, raw in self.feeder.pieces(data, 1):
                self.card.copy(to[first:first + raw.size], raw)
            finite.find_nonfinite(self.card, rows.values, flag)

    def vector(self, name: str) -> Array:
        return self.card.upload(self.gguf.floats(name), name)

    def check(self):
        """Raises ModelError if a matrix holds a value that is not a finite number."""
        damaged = np.flatnonzero(self.card.download(self.flags))
        if damaged.size:
            tensor = list(self.gguf.tensors.values())[damaged[0]]
            what = "block scale" if tensor.type in FORMATS else "value"
            raise ModelError(f"{self.gguf.file_of[tensor.name].path}: tensor '{tensor.name}' holds a {what} that is "
                             "not a finite number")


class SyntheticLoader(Loader):
    """Makes random tensors on the card. The values of a tensor depend on its name and type alone."""

    # The small tensors have the ranges of trained models; vectors that are not named here lie around 1.
    RANGES = {"ssm_a": (-8.0, -0.05), "ssm_dt.bias": (-5.0, 1.0), "ssm_conv1d.weight": (-0.6, 0.6)}

    def fill(self, rows: Matrix, name: str):
        synthetic.random_matrix(self.card, FORMATS[rows.format], rows.values, rows.scales, rows.n, rows.k,
                                zlib.crc32(name.encode()))

    def vector(self, name: str) -> Array:
        array = super().vector(name)
        low, high = self.RANGES.get(re.sub(r"^blk\.\d+\.", "", name), (0.9, 1.1))
        synthetic.random_uniform(self.card, array, low, high, zlib.crc32(name.encode()))
        return array


class Weights:
    """The tensors of a model, on no card yet. This class has no values, which suffices for plans; subclasses have some.

    shapes: name -> row-major shape of every tensor. type_of(name): the tensor's type, as GGUF has it.
    """

    gguf: GGUF | None = None        # the file that they are in

    def __init__(self, shapes: dict[str, tuple[int, ...]], type_of):
        self.shapes, self.type_of = shapes, type_of

    def loading(self, card: Card):
        """Context manager: gives a Loader for use by one thread. Damaged tensors raise ModelError when the `with` body
        ends."""
        return contextlib.nullcontext(Loader(card, self.shapes, self.type_of))


class FileWeights(Weights):
    """The tensors of a GGUF file."""

    def floats(self, name: str) -> np.ndarray:
        """The values of a tensor as float32, on the host."""
        return self.gguf.floats(name)

    def __init__(self, gguf: GGUF):
        self.gguf = gguf
        super().__init__({name: tensor.shape for name, tensor in gguf.tensors.items()},
                         lambda name: gguf.tensors[name].type)

    @contextlib.contextmanager
    def loading(self, card: Card):
        loader = FileLoader(card, self)
        try:
            yield loader
            loader.check()
        finally:
            loader.feeder = loader.flags = loader.flag_of = None    # their memory is free again


class SyntheticWeights(Weights):
    """Random weights of a model's real shapes, made on the card: no file, nothing over the bus. A matrix is in
    `format`, or in Q8_0 if the length of its rows is not a multiple of the format's block."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], format: str = "Q8_0", architecture: str = "qwen35"):
        self.architecture = architecture
        super().__init__(shapes, lambda name: format if fits_blocks(shapes[name], format) else "Q8_0")

    def floats(self, name: str) -> np.ndarray:
        """Values for a tensor that stays on the host."""
        shape = self.shapes[name]
        return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32) / shape[1] ** 0.5

    def loading(self, card: Card):
        return contextlib.nullcontext(SyntheticLoader(card, self.shapes, self.type_of))


def fits_blocks(shape: tuple[int, ...], format: str) -> bool:
    """Whether the rows of a matrix are a whole number of a format's blocks."""
    return shape[1] % FORMATS[format].file_block == 0
