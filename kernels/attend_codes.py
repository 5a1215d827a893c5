"""Scores of decoded tokens where keys lie in 8 bits: products of integers, for kernels/attend_decode.py.

    q . k = D^-1/2 sum over blocks of 128 dims (t_q t_k  sum over dims (n_q n_k))      n: codes, t: scales

The query becomes a row like those of the keys (kernels/kv_formats.py): turned, its codes rounded to 8 bits, a scale for
each 128 dims. The inner sum is an integer below 2^21, so it is exact in any order. The sum of each block is multiplied
by its scales in float32, and then the two products are added. So keys are never converted to halves, and a butterfly
adds integers.

A lane holds 8 dims of each of its keys, as 2 words of codes, and the scales of the keys whose products it has at the
end. With D = 256 the lanes 0 .. 15 have the first block of 8 keys and the lanes 16 .. 31 the second one; with D = 128
each half of the warp has 4 keys of its own.

    words, by lane:   | codes of key 0 | .. | codes of the last key | scales |        own_keys of them
                        2 words                                       own_keys / 4 words

Pipe: dp4a, 16 instructions for 8 keys of a query, where half2 takes 32, and 14 more to make halves of each key. Source:
the idea of integer scores is SageAttention's (arXiv 2410.02367).
"""

from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.intrinsics import (BIAS_FLOAT, BIAS_WORD, dp4a, half2_high, half2_low, load_shared, load_word,
                                word_as_float)
from kernels.kv_formats import PAGE
from kernels.rope import norm_rotate_function

EVERY_LANE = 0xFFFFFFFF
KEYS = 8                 # of a warp
CODE_WORDS = 2           # of a key and lane


def n_key_words(own_keys):
    """Words of a lane for its keys."""
    return CODE_WORDS * own_keys + own_keys // 4


def store_query_function(kind, head_dim, rotary):
    """store_query(query, at, lane, x, w, angles, eps): a query as a row of this kind, to element `at`."""
    parts, norm_rotate = kind.functions(head_dim), norm_rotate_function(head_dim, rotary)
    pack, write = parts.pack, parts.write

    @cuda.jit(device=True, forceinline=True)
    def store_query(query, at, lane, x, w, angles, eps):
        write(query, at, lane, pack(norm_rotate(x, w, angles, eps), lane))

    return store_query


@cuda.jit(device=True, forceinline=True)
def exchange(x, y, upper, offset):
    """A stage of the butterfly: of each pair of lanes the lower one keeps x and the upper one y, summed over the
    pair."""
    keep, send = (y, x) if upper else (x, y)
    return int32(keep + cuda.shfl_xor_sync(EVERY_LANE, send, offset))


@cuda.jit(device=True, forceinline=True)
def scale_of(scales, block):
    """Of a block of 128 dims, of a row's word of scales."""
    return half2_high(scales) if block != uint32(0) else half2_low(scales)


@cuda.jit(device=True, forceinline=True)
def as_float(n):
    """Exactly, for |n| < 2^22."""
    return word_as_float(uint32(uint32(n) + uint32(BIAS_WORD))) - float32(BIAS_FLOAT)


def key_functions(kind, head_dim, own_keys):
    """load_keys, put_key and dot_heads, as kernels/attend_decode.py has them for keys as halves."""
    parts, row = kind.functions(head_dim), kind.row(head_dim)
    load_codes, load_shared_codes, scales_at = parts.load_codes, parts.load_shared_codes, parts.scales
    n_code_words, n_scales, is_wide = CODE_WORDS * own_keys, own_keys // 4, own_keys == KEYS
    spread, root = 3 if is_wide else 7, float(head_dim) ** -0.5

    @cuda.jit(device=True, forceinline=True)
    def first_and_chunk(lane):
        """The first of the lane's keys among the warp's 8; which 8 dims are the lane's."""
        if is_wide:
            return uint32(0), lane
        return uint32(uint32(lane >> uint32(4)) * uint32(own_keys)), uint32(lane & uint32(15))

    @cuda.jit(device=True, forceinline=True)
    def key_of_scale(i, lane):
        return uint32(uint32(4) * i + uint32(uint32(lane >> uint32(2)) & uint32(spread)))

    @cuda.jit(device=True, forceinline=True)
    def load_all(words, pages, at, most, lane):
        """Loads the lane's words of the keys from element `at` of the pages on. Beyond key `most` it loads `most`."""
        own, chunk = first_and_chunk(lane)
        for j in range(uint32(own_keys)):
            key, n = uint32(min(j + own, most)), uint32(uint32(CODE_WORDS) * j)
            words[n], words[n + uint32(1)] = load_codes(pages, uint64(at + uint64(uint32(key * uint32(row)))), chunk)
        for i in range(uint32(n_scales)):
            key = uint32(min(key_of_scale(i, lane), most))
            words[uint32(n_code_words) + i] = load_word(pages, uint64(at + uint64(uint32(
                key * uint32(row) + uint32(scales_at)))))

    @cuda.jit(device=True, forceinline=True)
    def load_keys(words, pages, page, first, last, lane):
        """Loads the lane's words of the keys first .. first + 7. In place of keys beyond `last`, the last live one, it
        loads `last` again."""
        at = uint64(uint64(page * uint64(PAGE * row)) + uint64(uint32(first * uint32(row))))
        if uint32(first + uint32(KEYS - 1)) <= last:
            load_all(words, pages, at, uint32(KEYS - 1), lane)
        else:
            load_all(words, pages, at, uint32(last - first), lane)

    @cuda.jit(device=True, forceinline=True)
    def put_key(words, at, new, lane):
        """Replaces key `new` of the warp's 8 by the row at a shared address, and also the keys after it, in whose place
        `load_keys` has loaded that key again."""
        own, chunk = first_and_chunk(lane)
        w0, w1 = load_shared_codes(at, chunk)
        scales = load_shared(at + uint64(4 * scales_at))
        for j in range(uint32(own_keys)):
            if j + own >= new:
                n = uint32(uint32(CODE_WORDS) * j)
                words[n], words[n + uint32(1)] = w0, w1
        for i in range(uint32(n_scales)):
            if key_of_scale(i, lane) >= new:
                words[uint32(n_code_words) + i] = scales

    @cuda.jit(device=True, forceinline=True)
    def dot_four(query_at, k, first, lane):
        """Partial sums of the query at a shared address with 4 keys from `first` on: lane l gets key first +
        (l / 4) % 4, and the four lanes of a quad are still to be added."""
        x = cuda.local.array(4, int32)
        q0, q1 = load_shared_codes(query_at, uint32(0))
        for j in range(uint32(4)):
            n = uint32(uint32(CODE_WORDS) * uint32(first + j))
            x[j] = dp4a(q1, k[n + uint32(1)], dp4a(q0, k[n], int32(0)))
        upper = (lane & uint32(8)) != uint32(0)
        x0, x1 = exchange(x[0], x[2], upper, 8), exchange(x[1], x[3], upper, 8)
        return exchange(x0, x1, (lane & uint32(4)) != uint32(0), 4)

    @cuda.jit(device=True, forceinline=True)
    def sums_of_four(at0, at1, at2, at3, k, first, lane):
        """Of four queries: lane l gets query l % 4. Sums of the lanes of its half of the warp."""
        x0, x1 = dot_four(at0, k, first, lane), dot_four(at1, k, first, lane)
        x2, x3 = dot_four(at2, k, first, lane), dot_four(at3, k, first, lane)
        upper = (lane & uint32(2)) != uint32(0)
        x0, x1 = exchange(x0, x2, upper, 2), exchange(x1, x3, upper, 2)
        return exchange(x0, x1, (lane & uint32(1)) != uint32(0), 1)

    @cuda.jit(device=True, forceinline=True)
    def dot_heads(at0, at1, at2, at3, own_at, k, lane):
        """q . k of four queries at shared addresses: lane l gets the product of query l % 4, which is also at own_at,
        and key l // 4."""
        block = uint32(lane >> uint32(4)) if is_wide else uint32(0)
        t = scale_of(load_shared(own_at + uint64(4 * scales_at)), block) * float32(root)
        n = as_float(sums_of_four(at0, at1, at2, at3, k, uint32(0), lane))
        x = n * (scale_of(k[uint32(n_code_words)], block) * t)
        if is_wide:
            n = as_float(sums_of_four(at0, at1, at2, at3, k, uint32(4), lane))
            y = n * (scale_of(k[uint32(n_code_words + 1)], block) * t)
            keep, send = (y, x) if block != uint32(0) else (x, y)
            x = keep + cuda.shfl_xor_sync(EVERY_LANE, send, 16)
        return x

    return load_keys, put_key, dot_heads
