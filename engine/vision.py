"""The vision tower: from the pixels of pictures to rows that take the place of token embeddings.

    pixels ── cut_patches ── product ── + positions ── blocks ── post_ln ── 4 patches side by side ── mm.0, mm.2 ── rows
                                                         │                                            GELU
    block:  x += attn_out(attention(rotated qkv(ln1(x))))          x += ffn_down(gelu(ffn_up(ln2(x))))

A picture is a grid of blocks of 32 x 32 pixels; a block has 2 x 2 patches and becomes one row. The model is that of
files with the projector type `qwen3vl_merger` ("mmproj" files). The residual stream x is float32; what enters a product
is float16, and so are all matrices on the card. Pictures of several requests pass together: only attention keeps them
apart. A picture's rows have the same bits in whatever company it comes.

The scheduler queues a pass in pieces, and others have their turns between two pieces. An emulated card is slow: it may
take seconds for one block. So there a piece is some rows of a product, or some tiles of attention. No bit depends on
where a pass is cut.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.gguf import GGUF
from engine.request import ModelError
from kernels import half_gemm, layer_norm, patch_rope, patches, picture_attention
from kernels.card import Array, Card, PlannedCard
from kernels.formats import FLOATS
from kernels.half_gemm import HalfMatrix, gemm_half
from kernels.patches import Grid

PROJECTOR = "qwen3vl_merger"
TYPES = (*FLOATS, "Q8_0")           # of tensors that may be in a file
MERGED = patches.BLOCK ** 2         # patches of a row
LARGEST_HALF = 65504.0
SHARE = 0.35                        # of the half2 pipe's peak that a tower reaches
PIECE = 7e8                         # operations of a piece on an emulated card, about, at most, for each of its threads
PIECE_ROWS = 64                     # such a piece has a multiple of so many rows: a whole number of a product's tiles


# ---- what a tower is ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class VisionConfig:
    """The numbers of a tower."""

    width: int              # of the residual stream of a patch
    n_blocks: int
    n_heads: int
    ffn_dim: int
    side: int               # the table of positions has side * side rows
    hidden_dim: int         # of the text model, and of the rows that the tower makes
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads

    @classmethod
    def synthetic(cls, hidden_dim: int) -> "VisionConfig":
        """The tower of the published models (huggingface.co/Qwen/Qwen3.5-27B, config.json), for random weights."""
        return cls(width=1152, n_blocks=27, n_heads=16, ffn_dim=4304, side=48, hidden_dim=hidden_dim, norm_eps=1e-6)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> "VisionConfig":
        """The tower in a file. Raises ModelError where the file has none, or one that this module cannot run."""
        def fail(what):
            raise ModelError(f"{gguf.path}: {what}")

        def said(key, kind, default):
            return gguf.get(f"clip.{key}", kind, default)

        if gguf.get("general.architecture", str, "") != "clip" or not said("has_vision_encoder", bool, False):
            fail("the file has no vision tower: it is no mmproj file of a model that sees")
        if (projector := said("projector_type", str, said("vision.projector_type", str, "none"))) != PROJECTOR:
            fail(f"the vision tower has the projector type '{projector[:80]}', and only '{PROJECTOR}' can be run")
        if said("vision.patch_size", int, 16) != patches.SIZE or said("vision.spatial_merge_size", int, 2) != 2:
            fail("the vision tower does not take blocks of 2 x 2 patches of 16 x 16 pixels")
        for key in "image_mean", "image_std":
            array = gguf.get_array(f"clip.vision.{key}", "f", np.full(3, 0.5))
            if array.shape != (3,) or (array != 0.5).any():
                fail(f"key 'clip.vision.{key}' is not 0.5 for each colour")
        deep = gguf.get_array("clip.vision.is_deepstack_layers", "biu", np.zeros(0, bool))
        if deep.any() or any(name.startswith("v.deepstack.") for name in gguf.tensors):
            fail("the vision tower feeds several layers of the text model (deepstack), which cannot be run")
        if said("vision.n_wa_pattern", int, 0) or np.size(gguf.metadata.get("clip.vision.wa_layer_indexes", ())):
            fail("the vision tower looks at windows of a picture, which cannot be run")
        if said("use_silu", bool, False) or not said("use_gelu", bool, True):
            fail("the vision tower has another activation than GELU")

        def size(name):
            value = gguf.get(f"clip.vision.{name}", int)
            return value if 0 < value < 2**16 else fail(f"key 'clip.vision.{name}' is {value}, not a sensible size")

        config = cls(size("embedding_length"), size("block_count"), size("attention.head_count"),
                     size("feed_forward_length"), size("image_size") // patches.SIZE, size("projection_dim"),
                     gguf.get("clip.vision.attention.layer_norm_epsilon", float))
        config.check(gguf)
        return config

    def check(self, gguf: GGUF):
        """Raises ModelError where a file of these numbers cannot be run, or has not the tensors that they ask for."""
        def need(holds, what):
            if not holds:
                raise ModelError(f"{gguf.path}: {what}")

        need(self.width % (8 * self.n_heads) == 0 and self.head_dim <= picture_attention.MOST_DIM,
             f"the vision tower has {self.n_heads} heads in {self.width} numbers; a head must have a multiple of 8, at "
             f"most {picture_attention.MOST_DIM}")
        need(self.ffn_dim % 8 == 0 and self.hidden_dim % 4 == 0,
             f"the vision tower has MLPs of {self.ffn_dim} and rows of {self.hidden_dim} numbers, which must be "
             "multiples of 8 and of 4")
        need(0 < self.norm_eps < 1, f"key 'clip.vision.attention.layer_norm_epsilon' is {self.norm_eps}")
        shapes = self.shapes()
        for name in gguf.tensors:           # one that is left out would change what the tower computes
            need(name in shapes or not name.startswith(("v.", "mm.")) or name.startswith("mm.a."),      # a: of sound
                 f"the vision tower has a tensor '{name[:80]}', which cannot be run")
        for name, shape in shapes.items():
            need(name in gguf.tensors, f"tensor '{name}' of the vision tower is missing")
            tensor = gguf.tensors[name]
            need(tensor.shape == shape, f"tensor '{name}' has the shape {list(tensor.shape)}, not {list(shape)}")
            need(tensor.type in TYPES, f"tensor '{name}' is of type {tensor.type}; those of a vision tower may be "
                                       f"{', '.join(TYPES)}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> row-major shape of every tensor."""
        w, merged, kernel = self.width, MERGED * self.width, (patches.COLOURS, patches.SIZE, patches.SIZE)
        norms = [f"v.blk.{i}.ln{n}" for i in range(self.n_blocks) for n in (1, 2)] + ["v.post_ln"]
        maps = {"mm.0": (merged, merged), "mm.2": (self.hidden_dim, merged)}
        for i in range(self.n_blocks):
            maps |= {f"v.blk.{i}.{name}": shape for name, shape in (
                ("attn_qkv", (3 * w, w)), ("attn_out", (w, w)), ("ffn_up", (self.ffn_dim, w)),
                ("ffn_down", (w, self.ffn_dim)))}
        found = {"v.patch_embd.weight": (w, *kernel), "v.patch_embd.weight.1": (w, *kernel), "v.patch_embd.bias": (w,),
                 "v.position_embd.weight": (self.side ** 2, w)}
        for name, shape in [*maps.items(), *((norm, (w,)) for norm in norms)]:
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return found


# ---- weights -----------------------------------------------------------------------------------------------

class VisionWeights:
    """The tensors of a tower, on no card yet. This class has no values, which suffices for plans of memory."""

    def __init__(self, config: VisionConfig):
        self.config, self.shapes = config, config.shapes()

    def floats(self, name: str) -> np.ndarray | None:
        """The values of a tensor as float32, or float16 if it is stored so; None: there are none."""

    def half(self, *names: str) -> np.ndarray | None:
        """The sum of tensors as float16 [rows, columns]. Raises ModelError where a value does not fit."""
        values = [self.floats(name) for name in names]
        if values[0] is None:
            return None
        total = values[0] if len(values) == 1 else sum(each.astype(np.float32) for each in values)
        if total.dtype != np.float16:
            if (largest := np.abs(total).max()) > LARGEST_HALF:
                raise ModelError(f"{self.origin}: tensor '{names[0]}' holds {largest:g}, and half precision ends at "
                                 f"{LARGEST_HALF:g}")
            total = total.astype(np.float16)
        return total.reshape(len(total), -1)

    def vector(self, name: str) -> np.ndarray | None:
        """A tensor as float32."""
        values = self.floats(name)
        return None if values is None else values.astype(np.float32)


class FileVisionWeights(VisionWeights):
    """The tensors of an mmproj file. Raises ModelError, see VisionConfig.from_gguf."""

    def __init__(self, gguf: GGUF):
        super().__init__(VisionConfig.from_gguf(gguf))
        self.gguf, self.origin = gguf, gguf.path

    def floats(self, name: str) -> np.ndarray:
        if self.gguf.tensors[name].type != "F16":
            return self.gguf.floats(name)
        data = self.gguf.data(name)
        if not np.isfinite(data).all():
            raise ModelError(f"{self.origin}: tensor '{name}' holds a value that is not a finite number")
        return data


class SyntheticVisionWeights(VisionWeights):
    """Random weights. The values of a tensor depend on its name alone."""

    origin = "synthetic vision tower"

    def floats(self, name: str) -> np.ndarray:
        """Products of normed rows deviate by about 1; norms have weights around 1."""
        shape = self.shapes[name]
        values = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32) - np.float32(0.5)
        if len(shape) > 1:
            return values * np.float32((12 / np.prod(shape[1:])) ** 0.5)
        return values * np.float32(0.2) + np.float32(name.endswith("weight"))


# ---- the tower ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Norm:
    """A LayerNorm: float32 [width] each."""

    weight: Array
    bias: Array


@dataclass(frozen=True)
class Block:
    """A layer of a tower."""

    ln1: Norm
    qkv: HalfMatrix
    out: HalfMatrix
    ln2: Norm
    up: HalfMatrix
    down: HalfMatrix


class Scratch:
    """The scratch memory of a pass over up to `rows` patches.

    inputs  int32, flat                 the arrays of a Grid and the tiles of attention, one behind the other
    pixels  uint8, flat                 of the pictures, one behind the other. In the memory of x, which comes later
    x       float32 [rows, width]       the residual stream
    u       float16 [rows, width]       what a norm or attention gives
    wide    float16, flat               patches; queries, keys and values; inside an MLP, of some rows at a time; inside
                                        the merger
    """

    def __init__(self, card: Card, config: VisionConfig, rows: int):
        self.rows, self.most_tiles = rows, picture_attention.most_tiles(rows, rows // MERGED, config.head_dim)
        self.inputs = card.alloc(12 * rows + 3 * self.most_tiles, np.int32, "places of patches")
        memory = card.alloc(rows * max(patches.VALUES, 4 * config.width), np.uint8, "vision residual stream")
        self.pixels = memory[:rows * patches.VALUES]
        self.x = memory[:rows * 4 * config.width].view(np.float32).reshape(rows, config.width)
        self.u = card.alloc((rows, config.width), np.float16, "vision activations")
        inner = max(rows * max(3 * config.width, patches.VALUES), min(rows, PIECE_ROWS) * config.ffn_dim)
        self.wide = card.alloc(inner, np.float16, "vision inner activations")


class Tower:
    """A vision tower on a card."""

    def __init__(self, card: Card, weights: VisionWeights, max_tokens: int, progress=iter):
        """Puts the weights on the card. max_tokens: of a pass, and so of the largest picture. progress: goes around the
        numbers of the blocks, as tqdm does. Raises ModelError, OutOfMemory."""
        self.card, self.weights, self.config = card, weights, weights.config
        config = self.config
        self.patch = self._map("v.patch_embd.weight", "v.patch_embd.weight.1", bias="v.patch_embd.bias")
        self.table = self._put("v.position_embd.weight", weights.vector("v.position_embd.weight"), np.float32)
        self.blocks = [self._block(f"v.blk.{i}.") for i in progress(range(config.n_blocks))]
        self.post_ln = self._norm("v.post_ln")
        self.mm_0, self.mm_2 = self._map("mm.0.weight"), self._map("mm.2.weight")
        self.frequencies = card.upload(patch_rope.frequencies(config.head_dim), "frequencies of patches")
        self.scratch = Scratch(card, config, MERGED * max_tokens)
        self.weights = None         # a file's tensors need no more memory of the host

    def _put(self, name: str, values: np.ndarray | None, dtype, shape=None) -> Array:
        if values is None:
            return self.card.alloc(shape or self.weights.shapes[name], dtype, name)
        return self.card.upload(values, name)

    def _map(self, *names: str, bias: str | None = None) -> HalfMatrix:
        first, *rest = self.weights.shapes[names[0]]
        bias = bias or names[0].replace(".weight", ".bias")
        return HalfMatrix(self._put(names[0], self.weights.half(*names), np.float16, (first, int(np.prod(rest)))),
                          self._put(bias, self.weights.vector(bias), np.float32))

    def _norm(self, name: str) -> Norm:
        return Norm(*(self._put(each, self.weights.vector(each), np.float32)
                      for each in (f"{name}.weight", f"{name}.bias")))

    def _block(self, prefix: str) -> Block:
        one = lambda name: self._map(f"{prefix}{name}.weight")
        return Block(self._norm(f"{prefix}ln1"), one("attn_qkv"), one("attn_out"), self._norm(f"{prefix}ln2"),
                     one("ffn_up"), one("ffn_down"))

    def encode(self, pictures, outs: list[Array]) -> Iterator[None]:
        """Each of `outs`, float32 [tokens, hidden_dim], <- the rows of its picture. A generator, which queues copies
        and launches in the card's present stream, and yields after each piece of `seconds`. Where a value goes beyond
        half precision, rows hold infinity or NaN."""
        if (largest := max((picture.n_tokens for picture in pictures), default=0)) > self.most_tokens:
            raise ValueError(f"a picture of {largest} tokens, and the tower has room for {self.most_tokens}")
        first = 0
        for part in passes_of(pictures, self.most_tokens):
            tokens = [picture.n_tokens for picture in part]
            for _, launch in self._pieces(tokens, *self._place(part), outs[first:first + len(part)]):
                launch()
                yield
            first += len(part)

    def seconds(self, pictures, speed) -> list[float]:
        """About how long each piece of `encode` takes on a card of this Speed (kernels/probe.py)."""
        passes = [[picture.n_tokens for picture in part] for part in passes_of(pictures, self.most_tokens)]
        return [operations / (SHARE * speed.half2) for tokens in passes for operations, _ in self._pieces(tokens)]

    @property
    def most_tokens(self) -> int:
        """Of a pass."""
        return self.scratch.rows // MERGED

    def _place(self, pictures) -> tuple[Grid, Array]:
        """Brings what a pass reads to the card: pixels, the Grid and the tiles of attention."""
        pixels = self.scratch.pixels
        for picture in pictures:
            self.card.copy_in(pixels[:picture.pixels.size], picture.pixels.reshape(-1))
            pixels = pixels[picture.pixels.size:]
        grid = patches.grid_of([(picture.rows, picture.columns) for picture in pictures], self.config.side)
        return self._inputs(grid, self._tiles([picture.n_tokens for picture in pictures]))

    def _tiles(self, tokens: list[int]) -> np.ndarray:
        """Those of attention in pictures of so many tokens, see `picture_attention.tiles_of`."""
        return picture_attention.tiles_of([MERGED * n for n in tokens], self.config.head_dim)

    def _inputs(self, grid: Grid, tiles: np.ndarray) -> tuple[Grid, Array]:
        """Both on the card, by one copy."""
        arrays = [*grid, tiles]
        host = np.concatenate([array.reshape(-1).view(np.int32) for array in arrays])
        on_card = self.scratch.inputs[:host.size]
        self.card.copy_in(on_card, host)
        ends = itertools.accumulate(array.size for array in arrays)
        *grid, tiles = (on_card[end - array.size:end].view(array.dtype).reshape(array.shape)
                        for array, end in zip(arrays, ends))
        return Grid(*grid), tiles

    def rehearse(self):
        """Launches every kernel that a pass may need, for a picture of one block. Inside `Card.collecting` they are
        listed, so that they are compiled together before the first picture comes."""
        grid, tiles = self._inputs(patches.grid_of([(1, 1)], self.config.side), self._tiles([1]))
        out = self.card.alloc((1, self.config.hidden_dim), np.float32, "rows of a rehearsal")
        for shape in half_gemm.shapes_of(self.card):
            for _, launch in self._pieces([1], grid, tiles, [out], shape):
                launch()

    def _pieces(self, tokens: list[int], grid: Grid | None = None, tiles: Array | None = None, outs=None,
                shape: half_gemm.Shape | None = None) -> Iterator[tuple[int, Callable[[], None]]]:
        """(operations, launch) of each piece of a pass over pictures of so many tokens; launch() queues it. grid and
        tiles are on the card; without them and `outs` nothing can be queued. shape: of the products; by default the
        fastest."""
        card, config, scratch, rows = self.card, self.config, self.scratch, MERGED * sum(tokens)
        x, u, wide, heads = scratch.x, scratch.u, scratch.wide, (config.n_heads, config.head_dim)
        lengths = self._tiles(tokens)[:, 1]             # patches of each tile's picture

        def normalise(norm):
            layer_norm.layer_norm(card, u, x, norm.weight, norm.bias, rows, config.norm_eps)

        def normalise_first(norm):
            patches.add_positions(card, x, self.table, grid)
            normalise(norm)

        def multiply(y, matrix, given, ending, first, end):
            n, k = matrix.w.shape
            gemm_half(card, y.reshape(-1)[n * first:n * end], matrix, given.reshape(-1)[k * first:k * end], end - first,
                      ending, shape=shape)

        def products(n, y, matrix, given, ending, before=lambda: None):
            step = partial(multiply, y, matrix, given, ending)
            return self._pieces_of(step, n, 2 * math.prod(matrix.w.shape), before)

        def mlp(block):
            def step(first, end):
                multiply(wide, block.up, u[first:], "gelu", 0, end - first)
                multiply(x[first:], block.down, wide, "add", 0, end - first)

            return self._pieces_of(step, rows, 4 * math.prod(block.up.w.shape), partial(normalise, block.ln2),
                                   wide.size // config.ffn_dim)

        def attention():
            each = 4 * config.width * picture_attention.block_rows(config.head_dim)

            def launch(first, end):
                if not first:
                    patch_rope.rotate_patches(card, wide, grid.places, self.frequencies, heads[0], rows)
                picture_attention.attend_pictures(card, u, wide, tiles[first:end], *heads)

            return [(each * int(lengths[first:end].sum()), partial(launch, first, end))
                    for first, end in self._cuts(len(lengths), each * int(lengths[0]), 1)]

        yield from products(rows, x, self.patch, wide, "float",
                            before=lambda: patches.cut_patches(card, wide, scratch.pixels, grid))
        for block in self.blocks:
            begin = normalise_first if block is self.blocks[0] else normalise
            yield from products(rows, wide, block.qkv, u, "half", before=partial(begin, block.ln1))
            yield from attention()
            yield from products(rows, x, block.out, u, "add")
            yield from mlp(block)
        yield from products(rows // MERGED, wide, self.mm_0, u, "exact gelu", before=partial(normalise, self.post_ln))
        at = 0
        for n, out in zip(tokens, outs or [None] * len(tokens)):
            yield from products(n, out, self.mm_2, wide[at:], "float")
            at += n * MERGED * config.width

    def _pieces_of(self, step, n: int, operations: int, before, most: int | None = None):
        """The pieces of n rows of so many operations each, as `_pieces`. step(first, end) queues rows; before() comes
        before the first ones. most: rows of a piece, at most."""
        def launch(first, end):
            if not first:
                before()
            step(first, end)

        return [(operations * (end - first), partial(launch, first, end))
                for first, end in self._cuts(n, operations, most=most)]

    def _cuts(self, n: int, operations: int, unit: int = PIECE_ROWS, most: int | None = None) -> list[tuple[int, int]]:
        """(first, end) of the pieces of n rows of so many operations each: all rows, but at most `most`, and on an
        emulated card as many as PIECE says. unit: what a piece has a multiple of."""
        size = n if most is None or n <= most else most // unit * unit
        if self.card.kind == "emulated":
            size = min(size, unit * max(int(PIECE * self.card.threads / (unit * operations)), 1))
        return [(first, min(first + size, n)) for first in range(0, n, size)]


def passes_of(pictures, most_tokens: int) -> list[list]:
    """Pictures in their order, in passes of at most so many tokens and of about the same length: a short last one would
    leave a card half idle."""
    total = sum(picture.n_tokens for picture in pictures)
    enough = -(-total // max(-(-total // most_tokens), 1))      # tokens of each, if they could be cut anywhere
    passes, n_tokens = [], enough
    for picture in pictures:
        if n_tokens >= enough or n_tokens + picture.n_tokens > most_tokens:
            passes.append([])
            n_tokens = 0
        passes[-1].append(picture)
        n_tokens += picture.n_tokens
    return passes


# ---- from a name to a tower --------------------------------------------------------------------------------

@dataclass(frozen=True)
class OpenedTower:
    """A tower whose file is open and checked, on no card yet."""

    weights: VisionWeights

    def load(self, card: Card, max_tokens: int) -> Tower:
        """The tower on a card; on a PlannedCard its memory alone. max_tokens: of the largest picture. Raises
        ModelError, OutOfMemory."""
        weights = VisionWeights(self.weights.config) if isinstance(card, PlannedCard) else self.weights
        return Tower(card, weights, max_tokens)


def open_tower(mmproj: str | Path, hidden_dim: int) -> OpenedTower:
    """The tower of an mmproj file, or a random one of the real size by the name "synthetic". hidden_dim: of the text
    model. Raises ModelError."""
    if mmproj == "synthetic":
        return OpenedTower(SyntheticVisionWeights(VisionConfig.synthetic(hidden_dim)))
    weights = FileVisionWeights(GGUF(mmproj))
    if weights.config.hidden_dim != hidden_dim:
        raise ModelError(f"{weights.origin}: the vision tower makes rows of {weights.config.hidden_dim} numbers, and "
                         f"the text model takes {hidden_dim}: they belong to different models")
    return OpenedTower(weights)
