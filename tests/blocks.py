"""What each block adds to a product of quantised weights, exact or rounded as the kernels round it, in NumPy."""

import numpy as np

from kernels import formats


def block_terms(format, raw, n, xq, xd):
    """For each block of a row of w [n, k], as in a file, and of quantised columns x: (dot int64 [columns, n],
    scale float32 [columns, n], minimum float64 [n], scaled sum of x float32 [columns, 1])."""
    codes, wd = formats.split(format, raw)
    q = format.values[codes]
    exact = formats.scales(format, wd, np.float64)
    scale, minimum = (np.broadcast_to(part, q.shape).reshape(n, -1, 32) for part in exact)
    if format.halves:       # d of each block, beside the integer scales of its halves
        d = wd.reshape(-1, format.wd_words)[:, 8].copy().view(np.float16).astype(np.float64).repeat(8).reshape(n, -1)
    for block in range(q.size // n // 32):
        x, w = xq[:, 32 * block:32 * block + 32].astype(np.int64), q.reshape(n, -1, 32)[:, block].astype(np.int64)
        w_scale = scale[:, block, 0]
        if format.halves:
            w, w_scale = w * np.rint(scale[:, block] / d[:, block, None]).astype(np.int64), d[:, block]
        x_sum = xd[:, block] * x.sum(axis=1).astype(np.float32)
        yield x @ w.T, w_scale.astype(np.float32) * xd[:, block, None], minimum[:, block, 0], x_sum[:, None]


def added(acc, format, dot, scale, minimum, x_sum):
    """acc float32 with a block's terms added as the kernels do. The float64 sum of an exact product and a float32
    rounds once more only in its 53rd bit."""
    acc = (dot * scale.astype(np.float64) + acc).astype(np.float32)
    return (x_sum.astype(np.float64) * -minimum + acc).astype(np.float32) if format.minimum else acc
