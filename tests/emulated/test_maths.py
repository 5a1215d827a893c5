"""All of Python's `math` in kernels: libdevice's code in PTX, run by the emulated card, against the C library."""

import math

import numpy as np
import pytest
from numba import cuda

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 1e-30, -1e-30, 1e30, -1e30, 105615.0, 3.4e38, 1e-44, np.inf, -np.inf,
         np.nan]
LARGE = [1e3, 4e4, 48039.0, 2e5, 1e7, 6381956970095103.0 * 2.0**61, 2.0**100, 1.7e38]
UNARY = ["sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2",
         "expm1", "log", "log2", "log10", "log1p", "sqrt", "ceil", "floor", "trunc", "erf", "erfc", "gamma", "lgamma",
         "fabs"]
BINARY = ["atan2", "pow", "fmod", "hypot", "copysign"]
EXACT = {"sqrt", "ceil", "floor", "trunc", "fabs", "fmod", "copysign"}
# Bounds in units of the last place, as NVIDIA's manual states them where they are above 4; 1 is the C library's.
ULPS = {("gamma", "float32"): 6, ("pow", "float32"): 5, ("gamma", "float64"): 11, ("erfc", "float64"): 6}
POLES = {"log": -np.inf, "log2": -np.inf, "log10": -np.inf, "log1p": -np.inf, "lgamma": np.inf}


def kernel_of(function, n):
    """A kernel that writes function(x[i]) or function(x[i], y[i]) to out[i]."""
    @cuda.jit
    def one(x, y, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = function(x[i])

    @cuda.jit
    def two(x, y, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = function(x[i], y[i])
    return one if n == 1 else two


def computed(card, function, x, *y):
    """function of all elements, by the card."""
    out = card.upload(np.full_like(x, 7))
    kernel = kernel_of(function, 1 + len(y))
    card.launch(kernel, -(-out.size // 64), 64, card.upload(x), card.upload(y[0] if y else x), out)
    return card.download(out)


def values(kind, seed):
    random = np.random.default_rng(seed)
    spread = np.concatenate([random.uniform(-3, 3, 120), random.uniform(-40, 40, 60),
                             random.standard_normal(60) * 2.0 ** random.integers(-40, 40, 60)])
    with np.errstate(over="ignore"):
        return np.concatenate([EDGES, LARGE, spread]).astype(kind)


def oracle(name, *x):
    """math.<name> in float64, with IEEE's answers where Python raises."""
    try:
        return float(getattr(math, name)(*map(float, x)))
    except OverflowError:
        negative = name == "sinh" and x[0] < 0 or name == "pow" and x[0] < 0 and x[1] % 2 == 1
        return -np.inf if negative else np.inf if name not in ("ceil", "floor", "trunc") else float(x[0])
    except ValueError:
        if name in ("atanh", "gamma") and abs(x[0]) == (name == "atanh") or name == "pow" and x[0] == 0:
            return np.inf if name == "pow" and x[1] % 2 != 1 else np.copysign(np.inf, x[0])
        pole = name == "lgamma" or x[0] == (-1 if name == "log1p" else 0)
        return POLES[name] if name in POLES and pole else x[0] if name in ("ceil", "floor", "trunc") else np.nan


def ulps(got, expected, kind):
    """The distance of two floats in units of the last place of `kind`."""
    with np.errstate(over="ignore"):
        rounded = np.array(expected).astype(kind)
    if np.isnan(rounded) or np.isnan(got):
        return 0 if np.isnan(rounded) and np.isnan(got) else np.inf
    if np.isinf(rounded) or np.isinf(got):
        return 0 if rounded == got else np.inf
    return abs(float(got) - expected) / float(np.spacing(np.abs(rounded)))


def bad(name, kind, x, got):
    """What is further off than the bound, to be empty."""
    bound = 0.5 if name in EXACT else ULPS.get((name, kind), 4)
    found = []
    for *arguments, result in zip(*x, got):
        expected = oracle(name, *arguments)
        # Near a root of lgamma the bound is one of the absolute value.
        near = name == "lgamma" and abs(expected) < 1 and abs(float(result) - expected) < 8 * np.finfo(kind).eps
        if ulps(result, expected, kind) > bound and not near:
            found.append((arguments, result, expected))
    return found


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY + BINARY)
def test_math(card, name, kind):
    x = [values(kind, 1)]
    if name in BINARY:
        x.append(np.random.default_rng(2).permutation(x[0]))
    assert bad(name, kind, x, computed(card, getattr(math, name), *x)) == []
