"""Full attention within pictures: every patch sees all patches of its picture, and none of another.

    s_j = q . k_j               over the patches j of the picture; q carries D^-1/2 log2(e), D = head_dim
    o   = sum_j 2^s_j v_j / sum_j 2^s_j

    qkv    float16 [rows, 3 heads D]    | queries | keys | values | of each patch, rotated (kernels/patch_rope.py)
    out    float16 [rows, heads D]      D a multiple of 8, at most 128
    tiles  int32 [blocks, 3]            what each block of threads takes: first row of the picture, rows of the picture,
                                        first row of the block in the picture

Rows of several pictures lie one behind the other. A picture's results have the bits of a launch for it alone.

Half precision where it is harmless. Products run on packed half2 FMA. A score is made of chains of at most 20 products
per half, a value of chains of 16 products per half. Their sums go into float32 at once, so a chain's rounding errors
(2^-11 of its partial sum each) do not grow with the picture. Softmax statistics, rescaling and all longer sums are
float32; probabilities, at most 1, are rounded to half for the product with v. A value beyond 4,000 in magnitude would
overflow a chain.

A block of 4 warps takes one head. A warp takes 24 rows (16 where D > 72) and walks over the keys, 32 at a time, with an
online softmax. Keys and values pass through shared memory. They are loaded into registers a product ahead: values
during the scores, the next keys during the product with the values. Values are transposed on the way, so that both
products are made alike: words of neighbouring elements along the sum, of a row of one side and a row of the other.

    shared memory, words:   q [4 warps][rows][D/2 + 0 or 4]     k [32 keys][D/2 + 0 or 4]     an odd number of 16 bytes,
                            p [4 warps][rows][16 + 4]           v [D][16 + 4]                 so 8 rows use all banks

    scores: lane (i, l) owns rows i, i + 4, i + 8, ... and keys 4 l .. 4 l + 3     k: row 8 c + l holds key 4 l + c
    values: the same rows and dims l, l + 8, l + 16, ...

For a lane of 6 rows, D = 72, 32 keys: 864 + 864 half2 fma for scores and values; their sums go into float32 by 408
instructions, 24 powers of 2 take about 340, and 222 loads come from shared memory. So 65 % of the peak is the bound of
a card whose half2 pipe takes an instruction in every cycle (Hopper). 6 rows leave registers for 12 warps on an SM. With
8 rows there are fewer loads, but only 8 warps, and 2,304 patches with 16 heads are just more than 132 SMs take at once.

Where no score of the warp exceeds its row's maximum so far, nothing is rescaled, since the factor would be exactly 1.
A score that is NaN counts as above the maximum, and makes the row's sum NaN, as in kernels/attention.py. Without this
it would be lost: maxima ignore a NaN, so its key would get the probability 0. Keys and values beyond the picture are
never read: the last one takes their place, with a probability of 0.

Pipe: half2.
"""

from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.attention import MINUS_INFINITY, NAN, any_above, any_nan, power_of_two
from kernels.bench import Case, main
from kernels.float_matmul import place_of_8
from kernels.intrinsics import (div_rn, float_max, half2_high, half2_low, half_bits, hfma2, hmul2, load_shared4,
                                load_words2, load_words4, pack_half2, prmt, shared_address,
                                store_shared, store_shared2, store_shared4)

WARPS = 4                # per block
THREADS = 32 * WARPS
KEYS = 32                # at a time
PAIRS = KEYS // 2
KEY_SHARERS, VALUE_SHARERS = THREADS // KEYS, THREADS // PAIRS      # threads that carry a key, or two values, together
LINE = PAIRS + 4         # words of a row of p and of v in shared memory
MOST_DIM = 128
LONGEST = 5              # longest chain of a score, in pieces of 8 dims
EVERY_LANE = 0xFFFFFFFF


def lane_rows(head_dim):
    """Rows of a lane."""
    return 6 if head_dim <= 72 else 4


def value_rows(head_dim):
    """Rows of a lane whose products with values are added up at the same time."""
    return 2 if head_dim <= 72 else 4


def resident_blocks(head_dim):
    """Blocks that an SM must hold: bounds the registers. With 31,872 B each, where D = 72, a T4 holds two."""
    return 3 if head_dim <= 72 else 2


def block_rows(head_dim):
    """Rows of a block of threads."""
    return WARPS * 4 * lane_rows(head_dim)


def picture_attention_reference(qkv, lengths):
    """qkv [rows, 3, heads, D], rows of each picture -> float64 [rows, heads D]."""
    q, k, v = (np.asarray(qkv[:, i], np.float64) for i in range(3))
    out, first = np.empty((len(qkv), q[0].size)), 0
    for n in lengths:
        here = slice(first, first + n)
        scores = np.einsum("qhd,khd->hqk", q[here], k[here])
        p = np.exp2(scores - scores.max(axis=-1, keepdims=True))
        out[here] = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v[here]).reshape(n, -1)
        first += n
    return out


# ---- parts -------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def row_max(x):
    """Over the 8 lanes that have the same rows (`place_of_8`)."""
    for offset in (8, 4, 2):
        x = float_max(x, cuda.shfl_xor_sync(EVERY_LANE, x, offset))
    return x


@cuda.jit(device=True, forceinline=True)
def row_sum(x):
    for offset in (8, 4, 2):
        x = x + cuda.shfl_xor_sync(EVERY_LANE, x, offset)
    return x


def carriers(head_dim):
    """(fetch_keys, put_keys, fetch_values, put_values): how a thread brings its share of 32 keys and values to shared
    memory by way of registers. Arguments of fetch: (raw, qkv, at, stride, first, last, thread); at: element of the
    picture's first key or value; stride: elements from a row to the next; `last` replaces the keys beyond it.

    KEY_SHARERS threads carry a key; in turn i a thread takes the piece thread % KEY_SHARERS + KEY_SHARERS i of 8 dims.
    VALUE_SHARERS threads carry two neighbouring values; in turn i a thread takes their dims
    4 (thread // PAIRS + VALUE_SHARERS i) and the next three."""
    pieces, groups, pitch = head_dim // 8, head_dim // 4, 16 * (head_dim // 8 | 1)

    @cuda.jit(device=True, forceinline=True)
    def fetch_keys(raw, qkv, at, stride, first, last, thread):
        line, piece = uint32(thread // uint32(KEY_SHARERS)), uint32(thread % uint32(KEY_SHARERS))
        key = uint32(first + uint32(uint32(line & uint32(7)) << uint32(2)) + uint32(line >> uint32(3)))
        at = uint32(at + uint32(min(key, last) * stride) + uint32(piece << uint32(3)))
        for i in range(len(raw)):
            if uint32(piece + uint32(KEY_SHARERS * i)) < uint32(pieces):
                raw[i, 0], raw[i, 1], raw[i, 2], raw[i, 3] = load_words4(qkv, uint32(at + uint32(8 * KEY_SHARERS * i)))

    @cuda.jit(device=True, forceinline=True)
    def put_keys(raw, to, thread):
        line, piece = uint32(thread // uint32(KEY_SHARERS)), uint32(thread % uint32(KEY_SHARERS))
        to = to + uint64(uint32(uint32(line * uint32(pitch)) + uint32(piece << uint32(4))))
        for i in range(len(raw)):
            if uint32(piece + uint32(KEY_SHARERS * i)) < uint32(pieces):
                store_shared4(to + uint64(16 * KEY_SHARERS * i), raw[i, 0], raw[i, 1], raw[i, 2], raw[i, 3])

    @cuda.jit(device=True, forceinline=True)
    def fetch_values(raw, qkv, at, stride, first, last, thread):
        group, key = uint32(thread >> uint32(4)), uint32(first + uint32(uint32(thread & uint32(15)) << uint32(1)))
        at = uint32(at + uint32(group << uint32(2)))
        one, two = uint32(at + uint32(min(key, last) * stride)), uint32(
            at + uint32(min(uint32(key + uint32(1)), last) * stride))
        for i in range(len(raw)):
            if uint32(group + uint32(VALUE_SHARERS * i)) < uint32(groups):
                raw[i, 0], raw[i, 1] = load_words2(qkv, uint32(one + uint32(4 * VALUE_SHARERS * i)))
                raw[i, 2], raw[i, 3] = load_words2(qkv, uint32(two + uint32(4 * VALUE_SHARERS * i)))

    @cuda.jit(device=True, forceinline=True)
    def put_values(raw, to, thread):
        group = uint32(thread >> uint32(4))
        to = to + uint64(uint32(uint32(group * uint32(16 * LINE)) + uint32(uint32(thread & uint32(15)) << uint32(2))))
        for i in range(len(raw)):
            if uint32(group + uint32(VALUE_SHARERS * i)) < uint32(groups):
                for j in range(2):
                    here = to + uint64(4 * LINE * (4 * VALUE_SHARERS * i + 2 * j))
                    store_shared(here, prmt(raw[i, j], raw[i, j + 2], uint32(0x5410)))
                    store_shared(here + uint64(4 * LINE), prmt(raw[i, j], raw[i, j + 2], uint32(0x7632)))

    return fetch_keys, put_keys, fetch_values, put_values


def product_functions(head_dim):
    """(add_scores, add_values)."""
    rows, dims, pieces, pitch = lane_rows(head_dim), head_dim // 8, head_dim // 8, 16 * (head_dim // 8 | 1)
    group = value_rows(head_dim)

    @cuda.jit(device=True, forceinline=True)
    def add_chains(s, q_at, k_at, first, last):
        """s[r, c] += row r of q . key c over the pieces first .. last - 1 of 8 dims."""
        h = cuda.local.array((rows, 4), uint32)
        k = cuda.local.array((4, 4), uint32)
        q = cuda.local.array(4, uint32)
        for piece in range(first, last):
            for c in range(4):
                k[c, 0], k[c, 1], k[c, 2], k[c, 3] = load_shared4(k_at + uint64(8 * pitch * c + 16 * piece))
            for r in range(rows):
                q[0], q[1], q[2], q[3] = load_shared4(q_at + uint64(4 * pitch * r + 16 * piece))
                for j in range(4):
                    for c in range(4):
                        h[r, c] = hmul2(q[j], k[c, j]) if piece == first and j == 0 else hfma2(q[j], k[c, j], h[r, c])
        for r in range(rows):
            for c in range(4):
                s[r, c] = s[r, c] + (half2_low(h[r, c]) + half2_high(h[r, c]))

    @cuda.jit(device=True, forceinline=True)
    def add_scores(s, q_at, k_at):
        for r in range(rows):
            for c in range(4):
                s[r, c] = float32(0.0)
        add_chains(s, q_at, k_at, 0, min(LONGEST, pieces))
        if pieces > LONGEST:
            add_chains(s, q_at, k_at, LONGEST, min(2 * LONGEST, pieces))
        if pieces > 2 * LONGEST:
            add_chains(s, q_at, k_at, 2 * LONGEST, min(3 * LONGEST, pieces))
        if pieces > 3 * LONGEST:
            add_chains(s, q_at, k_at, 3 * LONGEST, pieces)

    @cuda.jit(device=True, forceinline=True)
    def chain_values(h, p_at, v_at, fresh):
        """8 keys: 4 links of every chain."""
        v = cuda.local.array((dims, 4), uint32)
        p = cuda.local.array(4, uint32)
        for d in range(dims):
            v[d, 0], v[d, 1], v[d, 2], v[d, 3] = load_shared4(v_at + uint64(8 * 4 * LINE * d))
        for r in range(group):
            p[0], p[1], p[2], p[3] = load_shared4(p_at + uint64(4 * 4 * LINE * r))
            for j in range(4):
                for d in range(dims):
                    h[r, d] = hmul2(p[j], v[d, j]) if fresh and j == 0 else hfma2(p[j], v[d, j], h[r, d])

    @cuda.jit(device=True, forceinline=True)
    def add_values_of_group(o, first, p_at, v_at):
        h = cuda.local.array((group, dims), uint32)
        p_at = p_at + uint64(4 * 4 * LINE * first)
        chain_values(h, p_at, v_at, True)
        chain_values(h, p_at + uint64(16), v_at + uint64(16), False)
        chain_values(h, p_at + uint64(32), v_at + uint64(32), False)
        chain_values(h, p_at + uint64(48), v_at + uint64(48), False)
        for r in range(group):
            for d in range(dims):
                o[first + r, d] = o[first + r, d] + (half2_low(h[r, d]) + half2_high(h[r, d]))

    @cuda.jit(device=True, forceinline=True)
    def add_values(o, p_at, v_at):
        """o[r, d] += row r of p . dim d of v over the 32 keys. Four rows at a time: all chains would not fit beside
        the sums into registers."""
        add_values_of_group(o, 0, p_at, v_at)
        if group < rows:
            cuda.syncwarp()     # else the assembler would take the groups together
            add_values_of_group(o, group, p_at, v_at)
        if 2 * group < rows:
            cuda.syncwarp()
            add_values_of_group(o, 2 * group, p_at, v_at)

    return add_scores, add_values


# ---- kernel ------------------------------------------------------------------------------------------------

@cache
def attention_kernel(head_dim):
    """The kernel for heads of so many dims."""
    rows, dims, pieces, pitch = lane_rows(head_dim), head_dim // 8, head_dim // 8, 16 * (head_dim // 8 | 1)
    warp_rows, all_rows = 4 * rows, block_rows(head_dim)
    q_bytes, k_bytes, v_bytes, p_warp = all_rows * pitch, KEYS * pitch, 4 * LINE * head_dim, 4 * LINE * warp_rows
    shared_words = (q_bytes + k_bytes + v_bytes + WARPS * p_warp) // 4
    key_items, value_items = -(-pieces // KEY_SHARERS), -(-head_dim // (4 * VALUE_SHARERS))
    resident = resident_blocks(head_dim)
    fetch_keys, put_keys, fetch_values, put_values = carriers(head_dim)
    add_scores, add_values = product_functions(head_dim)

    @cuda.jit(launch_bounds=(THREADS, resident))
    def attend_picture_kernel(out, qkv, tiles, heads):
        lane, warp, head = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.blockIdx.y)
        thread = uint32(uint32(warp << uint32(5)) + lane)
        listed = uint32(uint32(3) * uint32(cuda.blockIdx.x))
        begin, n = uint32(tiles[listed]), uint32(tiles[uint32(listed + uint32(1))])
        row0, last = uint32(tiles[uint32(listed + uint32(2))]), uint32(n - uint32(1))
        width = uint32(heads * uint32(head_dim))
        stride = uint32(uint32(3) * width)
        at = uint32(uint32(begin * stride) + head * uint32(head_dim))     # of the head's first query

        # Addresses in shared memory: *_to where a thread puts what it carries, *_at where a lane's rows begin.
        q_to = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        k_to = q_to + uint64(q_bytes)
        v_to = k_to + uint64(k_bytes)
        for item in range(thread, uint32(all_rows * pieces), uint32(THREADS)):
            line, piece = uint32(item // uint32(pieces)), uint32(item % uint32(pieces))
            row = min(uint32(row0 + line), last)
            w0, w1, w2, w3 = load_words4(qkv, uint32(at + uint32(row * stride) + piece * uint32(8)))
            store_shared4(q_to + uint64(uint32(line * uint32(pitch) + piece * uint32(16))), w0, w1, w2, w3)
        i, l = place_of_8(lane)
        q_at = q_to + uint64(uint32(uint32(warp * uint32(warp_rows) + i) * uint32(pitch)))
        k_at = k_to + uint64(uint32(l * uint32(pitch)))
        v_at = v_to + uint64(uint32(l * uint32(4 * LINE)))
        p_at = v_to + uint64(v_bytes) + uint64(uint32(uint32(warp * uint32(warp_rows) + i) * uint32(4 * LINE)))
        own_p_at = p_at + uint64(uint32(l << uint32(3)))

        o = cuda.local.array((rows, dims), float32)
        s = cuda.local.array((rows, 4), float32)
        high = cuda.local.array(rows, float32)      # maximum so far of each row,
        total = cuda.local.array(rows, float32)     # sum of the lane's own keys
        keys = cuda.local.array((key_items, 4), uint32)
        values = cuda.local.array((value_items, 4), uint32)
        for r in range(rows):
            high[r], total[r] = float32(MINUS_INFINITY), float32(0.0)
            for d in range(dims):
                o[r, d] = float32(0.0)
        fetch_keys(keys, qkv, uint32(at + width), stride, uint32(0), last, thread)
        first = uint32(0)
        while first <= last:
            put_keys(keys, k_to, thread)    # no warp reads those before any more: all have stored probabilities
            cuda.syncthreads()                  # and no warp reads the values before any more
            fetch_values(values, qkv, uint32(at + uint32(2) * width), stride, first, last, thread)
            add_scores(s, q_at, k_at)
            if uint32(first + uint32(KEYS - 1)) > last:
                for c in range(4):
                    if uint32(first + uint32(l << uint32(2)) + uint32(c)) > last:
                        for r in range(rows):
                            s[r, c] = float32(MINUS_INFINITY)
            moved = False
            for r in range(rows):
                moved = moved | any_above(s[r, 0], s[r, 1], s[r, 2], s[r, 3], high[r])
            if cuda.any_sync(EVERY_LANE, moved):
                for r in range(rows):
                    most = float_max(float_max(s[r, 0], s[r, 1]), float_max(s[r, 2], s[r, 3]))
                    new = float_max(high[r], row_max(most))
                    scale = power_of_two(high[r] - new)         # 1 if it stays
                    lost = any_nan(s[r, 0], s[r, 1], s[r, 2], s[r, 3])
                    total[r] = float32(NAN) if lost else total[r] * scale
                    high[r] = new
                    for d in range(dims):
                        o[r, d] = o[r, d] * scale
            for r in range(rows):
                a, b = power_of_two(s[r, 0] - high[r]), power_of_two(s[r, 1] - high[r])
                c, e = power_of_two(s[r, 2] - high[r]), power_of_two(s[r, 3] - high[r])
                total[r] = total[r] + ((a + b) + (c + e))
                store_shared2(own_p_at + uint64(4 * 4 * LINE * r), pack_half2(a, b), pack_half2(c, e))
            put_values(values, v_to, thread)
            cuda.syncthreads()
            first = uint32(first + uint32(KEYS))
            fetch_keys(keys, qkv, uint32(at + width), stride, first, last, thread)
            add_values(o, p_at, v_at)

        begin, row0 = uint32(tiles[listed]), uint32(tiles[uint32(listed + uint32(2))])  # loaded anew: fewer registers
        row0 = uint32(row0 + warp * uint32(warp_rows) + i)
        for r in range(rows):
            f = div_rn(float32(1.0), row_sum(total[r]))
            row = uint32(row0 + uint32(4 * r))
            if row < n:
                to = uint32(uint32(begin + row) * width + head * uint32(head_dim) + l)
                for d in range(dims):
                    out[uint32(to + uint32(8 * d))] = half_bits(o[r, d] * f)

    return attend_picture_kernel


def tiles_of(lengths, head_dim):
    """int32 [blocks, 3]: the tiles of pictures of so many patches, one behind the other. The longest come first."""
    tiles, first, each = [], 0, block_rows(head_dim)
    for n in lengths:
        tiles += [(first, n, row) for row in range(0, n, each)]
        first += n
    return np.array(sorted(tiles, key=lambda tile: -tile[1]), np.int32)


def most_tiles(rows, pictures, head_dim):
    """No launch of so many rows and pictures has more tiles."""
    return rows // block_rows(head_dim) + pictures


# ---- launches: they write in place and never allocate -----------------------------------------------------

def attend_pictures(card, out, qkv, tiles, heads, head_dim, *, stream=None):
    """out float16 [rows, heads * head_dim] <- attention of qkv float16 [rows, 3 * heads * head_dim]; both may have more
    rows. tiles: int32 [blocks, 3] of `tiles_of`."""
    if head_dim % 8 or not 0 < head_dim <= MOST_DIM:
        raise ValueError(f"heads have a multiple of 8 dims, at most {MOST_DIM}, not {head_dim}")
    card.launch(attention_kernel(head_dim), (tiles.shape[0], heads), (32, WARPS), out.view(np.uint16).reshape(-1),
                qkv.reshape(-1), tiles.reshape(-1), heads, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 8, (4,)), (2, 72, (4, 280, 128, 33)), (3, 72, (31, 32)), (2, 128, (100, 64)), (1, 128, (33,))]
# heads, head_dim, patches of each picture
TIMED = [(2304,), (9216,), (2304,) * 8]

# Relative L2 error of a row of a head. A score of some 2 has an error of 6e-4 of that by its chains, so 2^s has one of
# 9e-4; those of p, v and chains of 16 make 7e-4 of the result: 1.2e-3 together. Five standard deviations for the worst
# row.
TOLERANCE, TOLERANCE_ALL = 6e-3, 2.0 ** -9


def sample(heads, head_dim, rows, seed=0):
    """qkv float16 [rows, 3, heads, head_dim] with scores of about 2."""
    qkv = np.random.default_rng(seed).standard_normal((rows, 3, heads, head_dim))
    qkv[:, 0] *= 2 * head_dim ** -0.5
    return qkv.astype(np.float16)


def attended(card, qkv, lengths):
    """float16 [rows + 1, heads D]: what the kernel makes of host arrays; the last row was poisoned."""
    rows, _, heads, head_dim = qkv.shape
    out = card.alloc((rows + 1, heads * head_dim), np.float16)
    card.poison(out)
    attend_pictures(card, out, card.upload(qkv), card.upload(tiles_of(lengths, head_dim)), heads, head_dim)
    return card.download(out)


def check(card, heads, head_dim, lengths):
    """Compares with float64, and the first picture with a launch for it alone. Returns the largest relative L2 error of
    a row of a head."""
    rows = sum(lengths)
    qkv = sample(heads, head_dim, rows)
    got, want = attended(card, qkv, lengths), picture_attention_reference(qkv, lengths)
    assert np.isnan(got[rows]).all(), "wrote elsewhere"
    assert len(tiles_of(lengths, head_dim)) <= most_tiles(rows, len(lengths), head_dim)
    by_head = lambda x: np.linalg.norm(x.reshape(rows, heads, -1), axis=-1)
    error = (by_head(got[:rows] - want) / by_head(want)).max()
    assert error <= TOLERANCE, f"error {error}"
    assert np.linalg.norm(got[:rows] - want) <= TOLERANCE_ALL * np.linalg.norm(want)
    alone = attended(card, qkv[:lengths[0]], lengths[:1])
    np.testing.assert_array_equal(alone[:-1], got[:lengths[0]])
    return error


def cases(card):
    """The checked cases, then the times of pictures of a tower of the real size."""
    for case in CASES:
        yield Case("{} heads of {}, {}".format(*case), partial(check, card, *case))
    for lengths in TIMED if card.kind == "cuda" else ():
        heads, head_dim, rows = 16, 72, sum(lengths)
        qkv, out = card.upload(sample(heads, head_dim, rows)), card.alloc((rows, heads * head_dim), np.float16)
        tiles = card.upload(tiles_of(lengths, head_dim))
        yield Case(f"time of {len(lengths)} x {lengths[0]} patches", pipe="half2", launch=partial(
            attend_pictures, card, out, qkv, tiles, heads, head_dim),
            n_ops=sum(4 * heads * head_dim * n * n for n in lengths))


if __name__ == "__main__":
    main("Attention within pictures", cases)
