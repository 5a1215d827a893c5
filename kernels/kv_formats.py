"""KV formats: how keys and values lie in the pages of the KV cache, and how kernels write and read them.

A page holds the keys, or the values, of 64 consecutive tokens of a sequence, for all KV heads of a layer. Whatever the
format, a page of one head is 64 rows, one after the other, a row for each token:

    [n_pages, n_kv_heads, 64, elements of a row]

`KV_FORMATS` holds the formats by name. Each is one object: the cache asks it for the arrays of a layer, plans and the
bench for bytes, the kernels for their device functions, tests and notebooks for the NumPy twins. Three kernels are made
for a format: kernels/kv_cache.py stores prompts, kernels/attention.py reads them, kernels/attend_decode.py does both
for decoded tokens.

    float16   a row is the head_dim values rounded to half precision: 2 bytes per value

To add a format: write its device functions and NumPy twins in a section of their own, and add a line to `KV_FORMATS`.
Tests are parametrised over it. What a kernel sees of a value is always a half: `load` gives 8 dims as 4 words of two
halves. Scales of a row belong into the row, so that a layer has two arrays in every format, one of keys and one of
values. A format that rotates keys before it rounds them needs queries rotated alike; that has no seam here yet.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.types import float16, uint32

from kernels.intrinsics import load_shared4, load_words4
from kernels.rope import store_function

PAGE = 64  # tokens


@dataclass(frozen=True, eq=False)
class KVFormat:
    """One format. Device functions and NumPy twins:

    load(words, pages, at, i)   8 dims that begin at element `at` of the pages, as words 4 i .. 4 i + 3 of the local
                                array `words`, two halves in a word
    load_shared(address)        the same 8 dims of a row in shared memory -> 4 words
    store_function(head_dim)    gives store(pages, at, lane, x): a warp writes the row at element `at` of a global or
                                shared array; x: the lane's values of the head as a tuple (kernels/rope.py)
    encode(x)                   float [..., head_dim] -> rows as `store` writes them, [..., elements of a row]
    decode(rows)                rows -> float16 [..., head_dim], the values that `load` gives
    """

    name: str
    dtype: type                 # of an element: NumPy's
    element: object             # and Numba's
    row: Callable               # row(head_dim): elements of a row
    eight: int                  # elements from 8 dims to the next 8 in a row
    load: Callable
    load_shared: Callable
    store_function: Callable
    encode: Callable
    decode: Callable
    tolerance: float            # of a stored value: the largest error of encode and decode, relative to the row's |max|

    def arrays(self, n_pages, n_kv_heads, head_dim):
        """name -> (shape, dtype) of the arrays of a layer."""
        shape = n_pages, n_kv_heads, PAGE, self.row(head_dim)
        return {"keys": (shape, self.dtype), "values": (shape, self.dtype)}

    def token_bytes(self, n_kv_heads, head_dim):
        """Bytes of a token's keys and values in a layer."""
        return 2 * n_kv_heads * self.row(head_dim) * np.dtype(self.dtype).itemsize

    def page_bytes(self, n_kv_heads, head_dim):
        """Bytes of a page's keys and values in a layer."""
        return PAGE * self.token_bytes(n_kv_heads, head_dim)


# ---- float16 -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_halves(words, pages, at, i):
    n = uint32(uint32(4) * i)
    words[n], words[n + uint32(1)], words[n + uint32(2)], words[n + uint32(3)] = load_words4(pages, at)


def _to_half(x):
    return np.asarray(x).astype(np.float16)


# ---- the formats -------------------------------------------------------------------------------------------

KV_FORMATS = {format.name: format for format in (
    KVFormat("float16", np.float16, float16, lambda head_dim: head_dim, 8, load_halves, load_shared4,
             store_function, _to_half, _to_half, 2.0 ** -11),
)}
