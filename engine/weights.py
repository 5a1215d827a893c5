"""The tensors of a model: from a file, random, or for plans without values; and the Loaders that put them on a card.

    Weights       FileWeights     SyntheticWeights      what a model has, on no card yet
    PaperLoader   FileLoader      SyntheticLoader       Loaders, which put it on one card: `Weights.loading`
    Matrix, Stack, Experts                              what it becomes there
"""

import contextlib
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from engine.gguf import GGUF
from engine.request import ModelError
from kernels import finite, formats, synthetic
from kernels.card import Array, Card
from kernels.formats import FLOATS, FORMATS
from kernels.operands import Experts, Matrix
from kernels.upload import PIECE, Feeder


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

    shapes: name -> row-major shape of every tensor. type_of(name): the tensor's type, as GGUF has it. store: where
    experts go of which the card holds only some (engine/expert_store.py), else None. host_table: where token embeddings
    go if not onto the card (engine/host_table.py), else None.
    """

    store = host_table = None

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
            self.fill([matrix.rows(end - self.shapes[name][0], end)], name)
        return matrix

    def block(self, index: int, load: Callable):
        """What load(Tensors) makes of the tensors of block `index`."""
        return load(Tensors(self, index))

    def table(self, name: str) -> Matrix:
        """A Matrix of token embeddings, which nothing multiplies. Raises OutOfMemory, and CardError."""
        return self.host_table.add(name) if self.host_table else self.matrix(name)

    def stack(self, *names: str) -> Stack:
        """A Stack of tensors of one width that read the same input, in this order."""
        parts, column = [], 0
        for _, group in itertools.groupby(names, self.type_of):
            matrix = self.matrix(*group)
            parts.append((column, matrix))
            column += matrix.n
        return Stack(tuple(parts), column + -column % 4)

    def experts(self, *names: str) -> Experts:
        """The Experts of one tensor [n_experts, n, k], or of several of one type and of one k. Each expert then has its
        rows of the first tensor, below them those of the second. Raises OutOfMemory."""
        if self.store:
            return self.store.add(*names)
        format, (n_experts, _, k), title = self.type_of(names[0]), self.shapes[names[0]], " + ".join(names)
        assert all((self.type_of(name), self.shapes[name][2]) == (format, k) for name in names)
        ends = list(itertools.accumulate(self.shapes[name][1] for name in names))
        n = ends[-1]
        experts = Experts(alloc_matrix(self.card, format, n_experts * n, k, title), n,
                          self.card.alloc((n_experts, 2), np.uint64, f"{title} places"))
        for name, end in zip(names, ends):
            start = end - self.shapes[name][1]
            self.fill((experts.slot(i).rows(start, end) for i in range(n_experts)), name)
        self.card.copy_in(experts.places, places_of_slots(experts, n_experts))
        return experts

    def expert_stack(self, *names: str) -> tuple[tuple[int, Experts], ...]:
        """(first column, Experts) of tensors that read the same input; successive ones of one type are one Experts."""
        parts, column = [], 0
        for _, group in itertools.groupby(names, self.type_of):
            experts = self.experts(*group)
            parts.append((column, experts))
            column += experts.n
        return tuple(parts)

    def fill(self, parts: Iterable[Matrix], name: str):
        """Give matrices of equal sizes the values of a tensor, whose rows they are, one matrix after the other."""

    def vector(self, name: str) -> Array:
        """A norm weight, a bias or another small tensor, as float32 in its own shape."""
        array = self.card.alloc(self.shapes[name], np.float32, name)
        self.fill_floats(array, name)
        return array

    def float_matrix(self, *names: str) -> Matrix:
        """A float32 Matrix of several tensors, stacked row after row. A tensor of one dimension is one row."""
        k = self.shapes[names[0]][-1]
        ends = list(itertools.accumulate(math.prod(self.shapes[name]) // k for name in names))
        matrix = alloc_matrix(self.card, "F32", ends[-1], k, " + ".join(names))
        for name, start, end in zip(names, [0, *ends], ends):
            self.fill_floats(matrix.values[start:end], name)
        return matrix

    def fill_floats(self, array: Array, name: str):
        """Give a float32 array the values of a small tensor."""


class Tensors:
    """The tensors of block `index`, through a Loader, by their names in the block."""

    def __init__(self, loader: Loader, index: int):
        self.loader, self.prefix = loader, f"blk.{index}."

    def _names(self, names) -> list[str]:
        return [f"{self.prefix}{name}.weight" for name in names]

    def matrix(self, name: str) -> Matrix:
        return self.loader.matrix(*self._names([name]))

    def stack(self, *names: str) -> Stack:
        return self.loader.stack(*self._names(names))

    def experts(self, *names: str) -> tuple[tuple[int, Experts], ...]:
        return self.loader.expert_stack(*self._names(names))

    def float_matrix(self, *names: str) -> Matrix:
        return self.loader.float_matrix(*self._names(names))

    def vector(self, name: str) -> Array:
        return self.loader.vector(self.prefix + name)


class PaperLoader(Loader):
    """For plans: a block that is like one of an earlier plan, or of this one, is the same object once more. It takes as
    many bytes again."""

    def __init__(self, card: Card, weights: "Weights"):
        super().__init__(card, weights.shapes, weights.type_of)
        self.kinds, self.known = weights.kinds, weights.known

    def block(self, index: int, load: Callable):
        store, name = self.store, f"blk.{index}."
        cards, kind = [self.card, *([store.host] if store else [])], (self.kinds[index], store and store.n_slots)
        if kind in self.known:
            found, taken, stored = self.known[kind]
            for card, nbytes in zip(cards, taken, strict=True):
                card.set_aside(nbytes)
            if stored:
                store.layers[name] = stored
        else:
            before = [card.free_bytes for card in cards]
            found = super().block(index, load)
            taken = [free - card.free_bytes for free, card in zip(before, cards)]
            self.known[kind] = found, taken, store and store.layers[name]
        return found


class FileLoader(Loader):
    """Puts the tensors of a GGUF file on a card. Once all are there, `check` raises an error if the file is damaged."""

    def __init__(self, card: Card, weights: "FileWeights"):
        super().__init__(card, weights.shapes, weights.type_of)
        self.gguf, tensors = weights.gguf, weights.gguf.tensors
        self.feeder = Feeder(card, min(PIECE, max(tensor.nbytes for tensor in tensors.values())))
        self.flags = card.zeros(len(tensors), np.uint32, "flags of damaged tensors")
        self.flag_of = {name: self.flags[i:i + 1] for i, name in enumerate(tensors)}

    def fill(self, parts: Iterable[Matrix], name: str):
        """Sends the bytes of a tensor to the card, where a kernel repacks them and looks for damage."""
        parts, nbytes, flag = list(parts), self.gguf.tensors[name].nbytes, self.flag_of[name]
        format = FORMATS.get(parts[0].format)
        unit = format.file_bytes if format else 1
        for first, raw in self.feeder.pieces(partial(self.gguf.read, name), nbytes, unit):
            for part, at, piece in cut(parts, nbytes // len(parts), first * unit, raw):
                if format:
                    formats.repack(self.card, format, part.values, part.scales, piece, flag, at // unit, part.k)
                else:
                    self.card.copy(part.values.reshape(-1).view(np.uint8)[at:at + piece.size], piece)
        for part in parts:
            if not format:
                finite.find_nonfinite(self.card, part.values, flag)
        if (given := factors_of(self.gguf, name)) is not None:
            for part, factor in zip(parts, np.broadcast_to(given, len(parts)), strict=True):
                formats.scale_rows(self.card, format, part.scales, part.n, part.k, factor)

    def fill_floats(self, array: Array, name: str):
        self.card.copy_in(array, floats_of(self.gguf, name).reshape(array.shape))

    def check(self):
        """Raises ModelError if a matrix holds a value that is not a finite number."""
        damaged = np.flatnonzero(self.card.download(self.flags))
        if damaged.size:
            tensor = list(self.gguf.tensors.values())[damaged[0]]
            what = "block scale" if tensor.type in FORMATS else "value"
            raise ModelError(f"{self.gguf.file_of[tensor.name].path}: tensor '{tensor.name}' holds a {what} that is "
                             "not a finite number")


# ---- factors of matrices -------------------------------------------------------------------------------------------
# Files in NVFP4 have them in tensors of their own: X.scale, with a number for X.weight, or for each of its experts.
# X.input_scale is for cards that quantise activations to 4 bits.


def is_factor(gguf: GGUF, name: str) -> bool:
    """Whether a tensor is a factor, or is for 4-bit activations, of a matrix whose format takes one."""
    stem, _, kind = name.rpartition(".")
    matrix, tensor = gguf.tensors.get(f"{stem}.weight"), gguf.tensors[name]
    if matrix is None or matrix.type not in FORMATS or not FORMATS[matrix.type].row_head or tensor.type != "F32":
        return False
    shapes = [(1,)] + [(matrix.shape[0],)] * (len(matrix.shape) == 3)
    return kind in ("scale", "input_scale") and tensor.shape in shapes


def factors_of(gguf: GGUF, name: str) -> np.ndarray | None:
    """The factors of a matrix or of experts, float32 [1] or [n_experts]; None where there are none. Raises ModelError
    where one is not finite."""
    factor = f"{name.removesuffix('.weight')}.scale"
    return gguf.floats(factor) if factor in gguf.tensors and is_factor(gguf, factor) else None


def floats_of(gguf: GGUF, name: str) -> np.ndarray:
    """The values of a tensor of the model as float32: with its factor, if it has one."""
    values, given = gguf.floats(name), factors_of(gguf, name)
    return values if given is None else values * given.reshape(-1, *[1] * (values.ndim - 1))


def places_of_slots(experts: Experts, n_experts: int) -> np.ndarray:
    """What `Experts.places` says of n_experts experts that lie in the slots of their own numbers."""
    arrays, numbers = (experts.home.values, experts.home.scales), np.arange(n_experts, dtype=np.uint64)
    steps = np.array([array.nbytes // n_experts if array is not None else 0 for array in arrays], np.uint64)
    return np.array(experts.addresses(0), np.uint64) + numbers[:, None] * steps


def cut(parts: list[Matrix], part_bytes: int, start: int, raw: Array):
    """Yields (part, its first byte there, bytes) for each of the parts of a tensor that has bytes in `raw`. Each part
    has part_bytes of the tensor, and raw has those from `start` on."""
    end = start + raw.size
    for index in range(start // part_bytes, -(-end // part_bytes)):
        first = index * part_bytes
        low, high = max(start, first), min(end, first + part_bytes)
        yield parts[index], low - first, raw[low - start:high - start]


class SyntheticLoader(Loader):
    """Makes random tensors on the card. The values of a tensor depend on its name and type alone."""

    # The small tensors have the ranges of trained models; vectors that are not named here lie around 1. Logits of a
    # router deviate by about 1.
    RANGES = {"ssm_a": (-8.0, -0.05), "ssm_dt.bias": (-5.0, 1.0), "ssm_conv1d.weight": (-0.6, 0.6),
              "ffn_gate_inp.weight": (-0.04, 0.04), "ffn_gate_inp_shexp.weight": (-0.04, 0.04)}

    def fill(self, parts: Iterable[Matrix], name: str):
        for i, part in enumerate(parts):
            seed = zlib.crc32((f"{name} {i}" if i else name).encode())
            synthetic.random_matrix(self.card, FORMATS[part.format], part.values, part.scales, part.n, part.k, seed)

    def fill_floats(self, array: Array, name: str):
        low, high = self.RANGES.get(re.sub(r"^blk\.\d+\.", "", name), (0.9, 1.1))
        synthetic.random_uniform(self.card, array, low, high, zlib.crc32(name.encode()))


class Weights:
    """The tensors of a model, on no card yet. This class has no values, which suffices for plans; subclasses have some.

    shapes: name -> row-major shape of every tensor. type_of(name): the tensor's type, as GGUF has it.
    """

    gguf: GGUF | None = None        # the file that they are in

    def __init__(self, shapes: dict[str, tuple[int, ...]], type_of):
        self.shapes, self.type_of = shapes, type_of
        # Of plans: (kind of a block, its experts on the card) -> what it was loaded as, its bytes on the card and on
        # the host of the card's experts, its StoredLayer.
        self.known = {}

    @cached_property
    def kinds(self) -> dict[int, frozenset]:
        """{block: names, shapes and types of its tensors}: equal for blocks that are alike."""
        found = {}
        for name, shape in self.shapes.items():
            if name.startswith("blk."):
                _, index, rest = name.split(".", 2)
                found.setdefault(int(index), set()).add((rest, shape, self.type_of(name)))
        return {index: frozenset(tensors) for index, tensors in found.items()}

    @cached_property
    def slot_bytes(self) -> dict[int, int]:
        """{layer: bytes of the matrices of one of its experts}, of layers that have experts."""
        found = {}
        for name, shape in self.shapes.items():
            if len(shape) == 3:
                layer, format, (_, n, k) = int(name.split(".")[1]), self.type_of(name), shape
                arrays = FORMATS[format].arrays(n, k) if format in FORMATS else [((n, k), FLOATS[format].dtype)]
                found[layer] = found.get(layer, 0) + sum(math.prod(shape) * np.dtype(kind).itemsize
                                                         for shape, kind in arrays)
        return found

    def formats(self) -> list[str]:
        """The formats of the matrices of layers, without those of experts."""
        matrices = [name for name, shape in self.shapes.items() if name.startswith("blk.") and len(shape) == 2]
        return sorted({self.type_of(name) for name in matrices} & FORMATS.keys())

    def loading(self, card: Card):
        """Context manager: gives a Loader for use by one thread. Damaged tensors raise ModelError when the `with` body
        ends."""
        return contextlib.nullcontext(PaperLoader(card, self))


class FileWeights(Weights):
    """The tensors of a GGUF file."""

    def floats(self, name: str) -> np.ndarray:
        """The values of a tensor as float32, on the host."""
        return floats_of(self.gguf, name)

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
    """Whether the rows of a matrix, or of the matrices of experts, are a whole number of a format's blocks."""
    return shape[-1] % FORMATS[format].file_block == 0
