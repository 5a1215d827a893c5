"""What each block adds to a product of quantised weights, exact or rounded as the kernels round it, in NumPy."""

import numpy as np


def block_terms(format, raw, n, xq, xd):
    """For each block of a row of w [n, k], as in a file, and of quantised columns x: the terms that it adds, in their
    order, each as (integer [columns, n], factor [columns, n] that is a float32 or exact)."""
    terms = format.terms(raw.reshape(-1, format.file_bytes))
    q = terms.q.astype(np.int64)
    if terms.integers is not None:
        q = q * np.repeat(terms.integers, 16, axis=1)
    q, scale, minimum = (part.reshape(n, len(q) // n, part.shape[1]) for part in (q, terms.scale, terms.minimum))
    for block in range(q.shape[1]):
        x, w = xq[:, 32 * block:32 * block + 32].astype(np.int64), q[:, block]
        dots = [(x[:, part] @ w[:, part].T, scale[:, block, i] * xd[:, block, None])
                for i, part in enumerate(_parts(scale.shape[2]))]
        sums = [((xd[:, block] * x[:, part].sum(axis=1).astype(np.float32))[:, None], -minimum[:, block, i])
                for i, part in enumerate(_parts(minimum.shape[2]))]
        yield dots + sums


def _parts(count):
    """Nothing, a whole block, or its halves."""
    return [slice(32 // count * i, 32 // count * (i + 1)) for i in range(count)]


def added(acc, terms):
    """acc float32 with a block's terms added as the kernels do. The float64 sum of an exact product and a float32
    rounds once more only in its 53rd bit."""
    for a, b in terms:
        acc = (a.astype(np.float64) * b + acc).astype(np.float32)
    return acc
