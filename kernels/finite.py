"""Whether all numbers of a tensor of floats are finite: infinity or NaN means that the file is damaged.

    bad[0] = 1   where the exponent of a value is all ones

The scales of quantised tensors are checked where they are repacked (kernels/formats). Pipe: none; 2 or 4 bytes are
read per value, far faster than the link brings them.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import uint32

from kernels.bench import Case, main
from kernels.formats import FLOATS

WARPS = 4
ITEMS = 8                                               # of a thread of find_nonfinite
EXPONENTS = {np.dtype(kind.dtype).name: kind.exponent for kind in FLOATS.values()}


@cuda.jit
def find_nonfinite_kernel(words, bad, n, exponent):
    start = uint32(uint32(cuda.blockIdx.x) * uint32(32 * WARPS * ITEMS) + uint32(cuda.threadIdx.x))
    for j in range(uint32(ITEMS)):
        i = uint32(start + uint32(32 * WARPS) * uint32(j))
        if i < n:
            if uint32(words[i]) & exponent == exponent:
                bad[uint32(0)] = uint32(1)


# ---- launches: written in place, none allocates ------------------------------------------------------------

def find_nonfinite(card, values, bad, stream=None):
    """bad uint32 [1] becomes 1 where one of `values`, which have the dtype of one of FLOATS, is infinite or NaN; any
    shape."""
    exponent = EXPONENTS[values.dtype.name]
    words = values.reshape(-1).view(np.uint32 if values.dtype == np.float32 else np.uint16)
    card.launch(find_nonfinite_kernel, -(-words.size // (32 * WARPS * ITEMS)), 32 * WARPS, words, bad, words.size,
                exponent, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

def check(card, dtype):
    """One infinite value, or NaN, at the ends and within; and the largest finite ones."""
    for n, place in ((1, 0), (1025, 1024), (5000, 4097)):
        for word, is_bad in ((EXPONENTS[dtype], 1), (EXPONENTS[dtype] | 1, 1), (EXPONENTS[dtype] - 1, 0)):
            words = np.zeros(n, np.uint32 if dtype == "float32" else np.uint16)
            words[place] = word
            bad = card.zeros(1, np.uint32)
            find_nonfinite(card, card.upload(words.view(dtype)), bad)
            assert card.download(bad)[0] == is_bad, f"{dtype}: {word:#x} at {place} of {n}"
    return 0.0


def cases(card):
    """The checks, then the time of a piece of a file."""
    for dtype in EXPONENTS:
        yield Case(f"finite, {dtype}", partial(check, card, dtype))
    values, bad = card.zeros(1 << 23, np.float16), card.zeros(1, np.uint32)
    yield Case("16 MB of F16", launch=partial(find_nonfinite, card, values, bad), n_bytes=values.nbytes)


if __name__ == "__main__":
    main("Values that are finite", cases)
