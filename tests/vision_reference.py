"""The vision tower in NumPy: what engine/vision.py must compute, written from the formulas alone."""

import math

import numpy as np

ERF = np.frompyfunc(math.erf, 1, 1)


def layer_norm(x, weight, bias, eps):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight + bias


def gelu(x):
    """The form with tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def gelu_exact(x):
    return 0.5 * x * (1 + ERF(x / math.sqrt(2)).astype(np.float64))


def grid(rows, columns):
    """(row, column) of each patch of a picture of rows x columns blocks: blocks row after row, in each its 2 x 2."""
    at = np.arange(4 * rows * columns)
    block, inside = at // 4, at % 4
    return 2 * (block // columns) + inside // 2, 2 * (block % columns) + inside % 2


def patches_of(pixels):
    """uint8 [32 rows, 32 columns, 3] -> [patches, 3 * 16 * 16] from -1 to 1."""
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    scaled = (pixels / 255 - 0.5) / 0.5
    y, x = grid(rows, columns)
    return np.stack([scaled[16 * i:16 * i + 16, 16 * j:16 * j + 16].transpose(2, 0, 1).ravel() for i, j in zip(y, x)])


def position_rows(table, rows, columns):
    """The table [side^2, width], seen as a square, bilinear at the patches; its corners are those of the picture."""
    side = math.isqrt(len(table))
    square = table.reshape(side, side, -1)

    def between(n):
        at = np.linspace(0, side - 1, n)
        low = np.minimum(at.astype(int), side - 1)
        return low, np.minimum(low + 1, side - 1), (at - low)[:, None, None]

    low, high, f = between(2 * rows)
    lines = square[low] * (1 - f) + square[high] * f
    low, high, f = between(2 * columns)
    f = f.reshape(-1, 1)
    y, x = grid(rows, columns)
    return (lines[:, low] * (1 - f) + lines[:, high] * f)[y, x]


def rotated(q, rows, columns):
    """q [patches, heads, d] turned by row (the first d / 4 frequencies) and column."""
    d = q.shape[-1]
    frequencies = 10000.0 ** (-2 * np.arange(d // 4) / (d // 2))
    y, x = grid(rows, columns)
    angle = np.concatenate([y[:, None] * frequencies, x[:, None] * frequencies], axis=1)[:, None]
    a, b = q[..., :d // 2], q[..., d // 2:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def attend(q, k, v):
    """[patches, heads, d] each."""
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v)


def tower_reference(floats, config, pixels):
    """float64 [tokens, hidden] of a picture. floats(name): a tensor of the file."""
    f = lambda name: np.asarray(floats(name), np.float64)
    linear = lambda x, name: x @ f(f"{name}.weight").T + f(f"{name}.bias")
    norm = lambda x, name: layer_norm(x, f(f"{name}.weight"), f(f"{name}.bias"), config.norm_eps)
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    kernel = (f("v.patch_embd.weight") + f("v.patch_embd.weight.1")).reshape(config.width, -1)
    x = patches_of(pixels) @ kernel.T + f("v.patch_embd.bias")
    x = x + position_rows(f("v.position_embd.weight"), rows, columns)
    for i in range(config.n_blocks):
        name = f"v.blk.{i}"
        qkv = linear(norm(x, f"{name}.ln1"), f"{name}.attn_qkv").reshape(len(x), 3, config.n_heads, -1)
        q, k = (rotated(qkv[:, j], rows, columns) for j in range(2))
        x = x + linear(attend(q, k, qkv[:, 2]).reshape(len(x), -1), f"{name}.attn_out")
        x = x + linear(gelu(linear(norm(x, f"{name}.ln2"), f"{name}.ffn_up")), f"{name}.ffn_down")
    merged = norm(x, "v.post_ln").reshape(-1, 4 * config.width)
    return linear(gelu_exact(linear(merged, "mm.0")), "mm.2")
