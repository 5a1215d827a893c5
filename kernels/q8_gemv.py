"""Matrix x vector for decoding: quantised weights times int8 activations, a few columns at once, alone or
with the norm before them and SwiGLU behind them. Q8_0 is here; other formats plug in (`Format`).

    gemv               y[c, i] = sum over blocks b of 32:  dot(wq[i, b], xq[c, b]) * (wd[i, b] * xd[c, b])
                                                                       (+ y[c, i] with `add`)
    norm_gemv          the same, (xq, xd) = quantised RMSNorm of x: the bits of rms_norm_quantize, then gemv
    norm_gemv_swiglu   (q, d) = quantised silu(gate . u) * (up . u): the bits of these, then swiglu_quantize

    wq  int8    [n, k]         wd  float16 [n, k / 32]         Q8_0 split in two: rows of aligned words
    xq  int8    [columns, k]   xd  float32 [columns, k / 32]   of kernels/quantize.py
    x   float32 [columns, k]   y   float32 [columns, stride]
                               k a multiple of 32, n and columns any, n k below 2**32

The tree of additions is fixed, so a column has the same bits whatever n, its neighbours and the card are. A
warp walks rows of w by turns of 16 blocks:

        lane          0        1        2        3     ...    31
        weights    16 bytes 16 bytes 16 bytes 16 bytes ... 16 bytes      half a block each
        scales     |  block 0  |    |  block 1  |

then, where k leaves them, a step of 8 blocks with 8 bytes per lane, and one of up to 7 blocks that leaves the
last lanes idle. (Real models have k a multiple of 512; the two last steps are for the small ones.)

    lane:  acc = fma(float(dot of 16 or 8), wd * xd, acc)   step by step; the dot is exact, by dp4a
    warp:  butterfly sum of the 32 acc; with `add`, one more rounded addition

What happens when:
  * One block of threads per SM, or for some of them (`_n_blocks`), does all the work of a launch; a warp has a
    stretch of rows. So the norm is computed once per SM, and the stretches differ by one group of rows at most.
  * The weights of the next turns are under way in registers, a ring: behind each turn its place is asked for
    again, for the next turn of these rows or the first of the next ones. The ring is filled before the norm,
    so the weights travel while it is computed, and goes on through sums, stores and barriers.
  * SwiGLU: a warp has the same rows of gate and of up; 32 outputs meet in shared memory as a block of the
    quantisation, on two sides by turns, so that one barrier per 32 outputs is enough.
  * More than 4 columns: 2 or 4 warps take the same rows, each for its columns; they come from memory once. Where
    rows are many (SwiGLU and the head of a 9B), a warp takes up to 8.
  * The weights pass the first-level cache by (`stream_words4`), x stays in it; a single column of a packed format
    goes into shared memory, in planes.

Pipe: dp4a, but bound by memory: 1.06 n k bytes and n k columns / 4 dp4a per call. At its full bandwidth a
CMP 100-210 has time for 27 dp4a per word of weights, and eight columns need 8 of them and 6 float operations.

Measured on an H200 (2026-11-21, 4,590 GB/s of reads; a graph of launches over different random matrices, us):

                                                4096 x 4096  12352 x 4096  24576 x 4096  4096 x 12288
    bytes / bandwidth                                3.9         11.7          23.3          11.7
    1 row, 4 turns under way                         6.5         14.4          26.7          14.4
    2 rows, 2 turns asked for, then multiplied,      6.2         14.4          26.0          14.6
        blocks of 8 warps
    4 rows, 1 turn under way                         8.6         14.5          26.6          21.1
    2 rows, loads where they are used                9.3         15.3          27.6          24.0
    neighbouring rows on different SMs               7.0         15.1          27.4          14.9
    8 columns: 4 rows, 2 sets of warps               9.2         19.9          35.9          19.4
    16 columns: 4 sets                              15.9         36.1          65.8          37.5

The bytes beyond the first travel at 4,540 GB/s; what is lost is 2.4 us of every launch, its start and end. From
Hopper on the start is hidden: the next kernel's blocks take the SMs as this one's leave them, and fill their
rings before they wait for it (kernels/intrinsics.py, launches that overlap). On an H100 (2,970 GB/s), us:

                               out      gate, up      down       inputs     delta rule   the layer, 5 launches
    9B   bytes / bandwidth     6.0        36.0        18.0        18.1                        78.1 + states
         one by one            8.4        41.3        20.0        22.3         5.2           102.7
         overlapping           6.2        39.2        17.7        20.6         5.7            95.4
         ..., 16 warps         7.3        40.6        18.6        21.5         5.7           115.0
         ..., 8 warps, 8 turns 8.3        42.7        20.7        23.1         5.1           111.6
    0.8B one by one            3.0         7.4         4.7         7.1         5.0            28.9
         overlapping           1.9         5.9         3.4         6.5         5.6            26.2

(Blocks that leave room for a second one gather on the SMs that are free first, and others stay idle.) The norm
inside cost 1.2 us, a launch of its own 2.5. Since then its weights are asked for before the wait and ahead of the
ring (else they queue behind the 70 KB of each SM's ring, 3 us of the bandwidth). On a CMP 100-210, where nothing
overlaps, 129 launches of 2.4 us are 0.31 ms beside the 10.0 ms that the 8.3 GB of a 9B's token take at 829 GB/s: 3 %.

Tried and lost, on that H100: out, gate and up, down and inputs in one launch, with three barriers of the whole
grid between them and the rings filled before each (89.0 us for 91.6; a barrier is 1.06 us, an empty launch 0.91,
and the emulated card would need blocks that wait for each other); prefetch.global.L2 of the 4 or 12 turns behind
the ring (93.1), also before those barriers (94.0 and 95.6); x loaded before the ring is filled (91.9); the weights of
out asked for by idle SMs during the delta rule (14.85 for both launches, with 4, 8 or 16 MB 14.85, 15.8, 17.4).
On an H200: the next matrix's first 2 to 16 MB by prefetch at the end of a launch (0 to +1 us each). The small kernels
overlapping as well, each with both words at its start: 302.2 for 302.1 tokens/s of a 9B, 95.2 for 95.2 of a 27B.
SwiGLU on as many SMs as share its units evenly: 27B 95.46 for 95.94 tokens/s, on an H200 126.5 for 128.4. x of Q8_0
in shared memory: a token of a 27B 27 us less, of a 9B some 20 more, of a 0.8B 1 more. Half of an SM's memory for the
first-level cache in all kernels: no difference (96.64 for 96.60). 2 rows with 2 turns each, for down of a 0.8B, for
its 7 turns: 1,498 for 1 row with 4 turns 1,541.

What a token loses, on an H100 with overlap (2026-11-21, each kind of kernel replayed by itself; bytes at 2,970 GB/s):

    27B: bytes 8.91 ms                            launches    us each    bytes    lost
      gate and up, with norm and SwiGLU                 64       68.3     63.8     4.5     544 units of 32 outputs: 4
      inputs and head, with norm                        65       38.0     35.8     2.2     for each SM, and 16
      out, down                                        128       22.9     21.6     1.3
      delta rule / attention                       48 / 16  4.1 / 7.7      2.1
    tokens/s, each step with those above it             27B       9B    9B in Q4_K     0.8B
      before                                          95.46   302.97        467.78    1,541
      x in planes (Q4_K; here of Q8_0 in rows, too),
      one division (kernels/quantize.py), delta
      rule and attention load before the wait         96.60   303.80        483.83    1,590
      one block of the delta rule on an SM            97.00   306.78        491.17    1,645
    and not with the last one: 27B's inputs, 10 turns of one row in a ring of 5, 96.88 for 96.60; 0.8B's down, 7 turns
    in a ring of 7 (16 warps), 1,671 for 1,590
      all of these, Q8_0 not in rows (by --bench)                309.1        487.5     1,746
      SMs left to the next launch (below), attention
      and sampler, tokens copied beside the next step
      (by --bench, 2026-11-22)                    97.3       312.6        496.7     1,971

Q4_K was to be 1.6 times as fast as Q8_0; it is 1.59 times, as Q8_0 lost more of what it lost: 0.43 of its 3.20 ms (bytes
at 3,085 GB/s), for which Q4_K loses 0.49 of 2.01, 3 us of each of some 165 launches, of which an empty one that overlaps
takes 0.9. With no more lost than Q8_0 loses it would be 1.64 times.

In two sets of warps of 4 columns each the weights pass from the second-level cache to the SMs twice: 16.6 GB in the
3.50 ms of a 9B's products with 8 columns, 4.7 TB/s, at 79 (`gemv`) and 84 % (SwiGLU) of the memory's bandwidth. Such
a step on an H200 (2026-11-21, ms; all of it on an H100: 1,822 tokens/s, 1,838 with a set of 8 for SwiGLU and the
head, 1,827 with one for the inputs, too):

                                                    97 gemv     32 SwiGLU
    2 sets of 4 columns, 4 rows, 2 turns under way     1.87       1.22
    1 set of 8, 4 rows, 1 turn                         1.99       1.09     1,024 groups of rows for the 2,112 warps
    1 set of 8, 2 rows, 4 turns                        3.20       2.07     x of 8 columns for only 2 rows: L1
    2 sets of 4, 2 rows, 4 turns                       2.24       1.39

4 rows and 2 turns of 8 columns do not find registers.

SMs that a product leaves to the launch after it, whose rings are filled there meanwhile (H100, 2026-11-22): us of a
token more or less by the blocks of `out` or `down`, with 132 of each; in brackets warps' rounds with 132. The others are
as they were, for `down` the best `out`:

    blocks                             66     80     88    100    116    128
    0.8B        out   1024 x 2048     -25    -29    -26    -21    -16     -7    (0.24) all weights under way
                down  1024 x 3584     -23    -24    -22    -19     -9     -3    (0.48) the same
    2B          out   2048 x 2048     -30    -35    -33    -25    -10     -5    (0.48) the same
    4B          out   2560 x 4096     +48     +5     +2    -15    -13     -2    (0.61)
                down  2560 x 9216     -19    -21    -17    -24    -10     -2    (0.61)
       Q4_K     out                   -38    -73    -75    -71     +7     +6    (0.61) the same
    9B          out   4096 x 4096     +29    +29    +31    +34    +46      0    (0.97)
                down  4096 x 12288    +31    +38    +45    +57    +80     -1    (0.97)
       Q4_K     out                   -12    -21    -15    -15     +2     +2    (0.97) the same
    27B         out   5120 x 6144     +17    -22     -7    -12     -3     -1    (1.21)
       Q4_K     out                  +107    -36   -120   -113    -92     -8    (0.61)

As `_n_blocks` chooses, a token of a 0.8B takes 501 us for 547, of a 2B 920 for 961, of a 4B 1,927 for 1,976, of a 9B in
Q4_K 1,997 for 2,017, of a 27B in Q4_K 6,495 for 6,617, 9B and 27B what they took. Products after a norm want all SMs, but
those of attention (-4 us with 112 blocks for a 9B, -30 for a 27B), and so does SwiGLU (27B: 120 blocks -40, 112 -11,
96 +131): the delta rule, which comes next, needs few SMs. Lost beside that: blocks of 16 warps of 64 registers, so that
two launches' stand on every SM, the delta rule's grid filled up with blocks that only wait: half as many weights under
way, 9B 3,874 us for 3,211, Q4_K 2,292 for 2,028, 0.8B 566 for 555. The norm computed on other numbers before the wait,
for the cache of instructions: 0.8B 682 for 550.

`cuda.syncwarp` after the first loads of a ring is there for the assembler, which otherwise moves each load to
where it is used, to save registers.
"""

import math
from collections import namedtuple
from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int8, int32, uint16, uint32

from kernels.bench import Case, main
from kernels.compile import launches_overlap
from kernels.formats import BLOCK
from kernels.intrinsics import (BIAS_WORD, dp4a, float_as_word, half_to_float, let_next_begin, load_words2,
                                load_words4, silu, store_word, store_words4, stream_words2, stream_words4, unbias,
                                wait_for_previous)
from kernels.norm import MAX_WARPS, hold_weights, norm_quantizer, rms_norm_quantize, store_quantized
from kernels.quantize import block_scale, quantize_word
from kernels.swiglu import swiglu_quantize

MAX_COLUMNS = 16  # of one launch
WIDE_ROWS = 128  # of an SM from which on its warps take 8 columns: two groups of 4 rows for each of 16 warps
MAX_FUSED = 16384  # values of a column whose norm is computed inside
MAX_PLANES = 20480  # values of a column in planes; 17,408 for 27B's down
PLANE, SUMS = MAX_PLANES // 2, MAX_PLANES // BLOCK  # where second halves start, and sums behind scales
IN_PLANES = 2 * SUMS  # floats
HELD = 2, 4  # weights of the norm that a lane holds: all of 8,192 values, where 32 warps share them
SPARE, LEAST = 0.2, 0.6  # of a round of warps, of the SMs: see `_n_blocks`
H_SHAPE = 2, 2, MAX_COLUMNS * BLOCK  # sums of SwiGLU on their way to the quantisation: side, gate or up, output


def q8_reference(wq, wd, xq, xd):
    """float64 y [columns, n] by the formula above, without its order."""
    w = wq.reshape(len(wq), -1, BLOCK) * wd.astype(np.float64)[:, :, None]
    x = xq.reshape(len(xq), -1, BLOCK) * xd.astype(np.float64)[:, :, None]
    return x.reshape(xq.shape) @ w.reshape(wq.shape).T


# ---- weight formats ----------------------------------------------------------------------------------------
# The kernels below know of a format only this:
#
#   planes    whether it reads a single column in planes, see below
#   turn      blocks of 32 weights that a warp takes from a row at once
#   words     uint32 that each lane keeps of them: weights and scales
#   fetch     device function (raw, piece, row, block, k, lane, wq, wd): raw[piece] <- the lane's words of the
#             turn that starts at `block` of row `row`; it only loads
#   multiply  (rows, columns, planes) -> device function (acc, raw, piece, block, k, lane, x_starts, xq, xd):
#             acc[r, c] += the lane's share of raw[piece + r] times the same turn of column c
#   rest      (rows, columns, planes) -> device function (acc, w_rows, k, lane, wq, wd, x_starts, xq, xd):
#             acc[r, c] += what whole turns leave of row w_rows[r] times column c
#
# raw: local uint32 [pieces, words]. acc: local float32 [rows, columns]. w_rows: local uint32 [rows].
# x_starts: local uint32 [columns], the block at which a column starts in xq and xd, global or shared memory.

# In planes, in shared memory: the first 16 bytes of all blocks of xq, from PLANE on the others; in xd, from SUMS on,
# a block's scale times the sum of its 32 integers. So a lane that takes a whole block reads 16 bytes beside those of
# its neighbours, and minima need no sums of their own.

Format = namedtuple("Format", "planes turn words fetch multiply rest")


@cuda.jit(device=True, forceinline=True)
def fetch_q8(raw, piece, row, block, k, lane, wq, wd):
    at = uint32(row * uint32(k >> uint32(5)) + block)
    loaded = stream_words4(wq, uint32(uint32(at << uint32(5)) + uint32(lane << uint32(4))))
    for i in range(4):
        raw[piece, i] = loaded[i]
    raw[piece, 4] = uint32(wd[uint32(at + uint32(lane >> uint32(1)))])


def multiply_q8(rows, columns, planes):
    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, raw, piece, block, k, lane, x_starts, xq, xd):
        for c in range(columns):
            at = uint32(x_starts[c] + block)
            x = load_words4(xq, uint32(uint32(at << uint32(5)) + uint32(lane << uint32(4))))
            x_scale = xd[uint32(at + uint32(lane >> uint32(1)))]
            for r in range(rows):
                dot = int32(BIAS_WORD)
                for i in range(4):
                    dot = dp4a(raw[piece + r, i], x[i], dot)
                w_scale = half_to_float(uint16(raw[piece + r, 4]))
                acc[r, c] = cuda.fma(unbias(dot), w_scale * x_scale, acc[r, c])

    return multiply


def rest_q8(rows, columns, planes):
    @cuda.jit(device=True, forceinline=True)
    def add_blocks(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd):
        """A step of up to 8 blocks, 8 weights per lane."""
        byte, its_block = uint32(lane << uint32(3)), uint32(lane >> uint32(2))
        for r in range(rows):
            at = uint32(w_rows[r] * uint32(k >> uint32(5)) + block)
            w = stream_words2(wq, uint32(uint32(at << uint32(5)) + byte))
            w_scale = half_to_float(wd[uint32(at + its_block)])
            for c in range(columns):
                x_at = uint32(x_starts[c] + block)
                x = load_words2(xq, uint32(uint32(x_at << uint32(5)) + byte))
                dot = dp4a(w[1], x[1], dp4a(w[0], x[0], int32(BIAS_WORD)))
                acc[r, c] = cuda.fma(unbias(dot), w_scale * xd[uint32(x_at + its_block)], acc[r, c])

    @cuda.jit(device=True, forceinline=True)
    def rest(acc, w_rows, k, lane, wq, wd, x_starts, xq, xd):
        blocks = uint32(k >> uint32(5))
        if blocks & uint32(8):
            add_blocks(acc, w_rows, uint32(blocks & uint32(0xFFFFFFF0)), k, lane, wq, wd, x_starts, xq, xd)
        if uint32(lane >> uint32(2)) < uint32(blocks & uint32(7)):
            add_blocks(acc, w_rows, uint32(blocks & uint32(0xFFFFFFF8)), k, lane, wq, wd, x_starts, xq, xd)

    return rest


Q8 = Format(False, 16, 5, fetch_q8, multiply_q8, rest_q8)


# ---- x in planes -------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def in_plane(at):
    """Where byte `at` of a column is."""
    half = uint32(uint32(at >> uint32(4)) & uint32(1))
    return uint32(uint32(uint32(at >> uint32(5)) << uint32(4)) + uint32(at & uint32(15)) + half * uint32(PLANE))


@cuda.jit(device=True, forceinline=True)
def word_sum(word, total):
    """total + the four int8 of a word."""
    return dp4a(word, uint32(0x01010101), total)


@cuda.jit(device=True, forceinline=True)
def store_scale(d, block, scale, total):
    d[block], d[uint32(block + uint32(SUMS))] = scale, scale * float32(total)


@cuda.jit(device=True, forceinline=True)
def store_in_planes(q, d, at, inside, y0, y1, y2, y3):
    """`store_quantized` (kernels/norm.py) into planes."""
    w0, w1, w2, w3 = float_as_word(y0), float_as_word(y1), float_as_word(y2), float_as_word(y3)
    scale = block_scale(w0, w1, w2, w3)
    word = quantize_word(w0, w1, w2, w3, scale)
    total = word_sum(word, int32(0))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 4))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 2))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
    if inside:
        store_word(q, in_plane(at), word)
        if at & uint32(31) == uint32(0):
            store_scale(d, uint32(at >> uint32(5)), scale, total)


@cuda.jit(device=True, forceinline=True)
def load_half(xq, xd, i, inside):
    """Half block i of a column and its scale, or zeros."""
    w0, w1, w2, w3, scale = uint32(0), uint32(0), uint32(0), uint32(0), float32(0)
    if inside:
        w0, w1, w2, w3 = load_words4(xq, uint32(i << uint32(4)))
        scale = xd[uint32(i >> uint32(1))]
    return w0, w1, w2, w3, scale


@cuda.jit(device=True, forceinline=True)
def store_half(q, d, i, inside, w0, w1, w2, w3, scale):
    """The same into planes; all lanes call."""
    total = word_sum(w3, word_sum(w2, word_sum(w1, word_sum(w0, int32(0)))))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
    if inside:
        store_words4(q, in_plane(uint32(i << uint32(4))), w0, w1, w2, w3)
        if i & uint32(1) == uint32(0):
            store_scale(d, uint32(i >> uint32(1)), scale, total)


@cuda.jit(device=True, forceinline=True)
def copy_into_planes(q, d, xq, xd, k, thread, threads):
    """(q, d), shared <- a column, by a block of threads, for each two half blocks under way."""
    halves, i, first = uint32(k >> uint32(4)), thread, uint32(thread & uint32(0xFFFFFFE0))  # of the warp
    while first < halves:
        j = uint32(i + threads)
        a0, a1, a2, a3, a = load_half(xq, xd, i, i < halves)
        b0, b1, b2, b3, b = load_half(xq, xd, j, j < halves)
        store_half(q, d, i, i < halves, a0, a1, a2, a3, a)
        store_half(q, d, j, j < halves, b0, b1, b2, b3, b)
        i, first = uint32(j + threads), uint32(first + threads + threads)


# ---- what the kernels are made of --------------------------------------------------------------------------

def ring(fmt, rows, columns, slots, planes):
    """Device functions (start, multiply_rows): `rows` rows of w times `columns` columns by a warp, the
    weights of the next `slots` turns always under way, in registers raw [rows slots, words]; or, without
    slots, asked for where they are used."""
    turn, stride, fetch = fmt.turn, fmt.turn * slots, fmt.fetch
    multiply, rest = fmt.multiply(rows, columns, planes), fmt.rest(rows, columns, planes)
    spare_shape = rows, fmt.words

    @cuda.jit(device=True, forceinline=True)
    def multiply_from(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd):
        """acc += all from `block` on, of which nothing is under way."""
        spare = cuda.local.array(spare_shape, uint32)
        while uint32(block + uint32(turn)) <= uint32(k >> uint32(5)):
            for r in range(rows):
                fetch(spare, r, w_rows[r], block, k, lane, wq, wd)
            multiply(acc, spare, 0, block, k, lane, x_starts, xq, xd)
            block = uint32(block + uint32(turn))
        rest(acc, w_rows, k, lane, wq, wd, x_starts, xq, xd)

    @cuda.jit(device=True, forceinline=True)
    def start_nothing(raw, w_rows, k, lane, wq, wd):
        pass

    @cuda.jit(device=True, forceinline=True)
    def multiply_at_once(acc, raw, w_rows, next_rows, more, k, lane, wq, wd, x_starts, xq, xd):
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = float32(0.0)
        multiply_from(acc, w_rows, uint32(0), k, lane, wq, wd, x_starts, xq, xd)

    @cuda.jit(device=True, forceinline=True)
    def start(raw, w_rows, k, lane, wq, wd):
        """Asks for the first turns of rows w_rows."""
        if uint32(k >> uint32(5)) >= uint32(stride):
            for s in range(slots):
                for r in range(rows):
                    fetch(raw, s * rows + r, w_rows[r], uint32(s * turn), k, lane, wq, wd)
        cuda.syncwarp()  # keeps the assembler from moving the loads to where they are used

    @cuda.jit(device=True, forceinline=True)
    def multiply_rows(acc, raw, w_rows, next_rows, more, k, lane, wq, wd, x_starts, xq, xd):
        """acc <- the lane's share of the products of rows w_rows, whose first turns are under way. Leaves
        those of next_rows under way, if there are `more`."""
        blocks = uint32(k >> uint32(5))
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = float32(0.0)
        rows_after = cuda.local.array(rows, uint32)
        block = uint32(0)
        while uint32(block + uint32(stride)) <= blocks:
            after = uint32(block + uint32(stride))
            is_last = uint32(after + uint32(stride)) > blocks
            wanted = more or not is_last
            for r in range(rows):
                rows_after[r] = next_rows[r] if is_last else w_rows[r]
            after = uint32(0) if is_last else after
            for s in range(slots):
                multiply(acc, raw, s * rows, uint32(block + uint32(s * turn)), k, lane, x_starts, xq, xd)
                if wanted:
                    at = uint32(after + uint32(s * turn))
                    for r in range(rows):
                        fetch(raw, s * rows + r, rows_after[r], at, k, lane, wq, wd)
            block = uint32(block + uint32(stride))
        multiply_from(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd)

    return (start, multiply_rows) if slots else (start_nothing, multiply_at_once)


def lane_sums(count):
    """Device function (values, lane) -> on lane l the sum over the lanes of value l >> (5 - bits) of the
    `count` values, bits = log2 of count rounded up. At every step of the butterfly a lane keeps half of its
    values, so 16 values take 16 shuffles and not 80; each is summed in the order of `warp_sum`."""
    def step(half, distance):
        here = min(count, 2 * half)  # values that are left
        rest = step(half // 2, distance // 2) if half > 1 else total_of(distance)

        @cuda.jit(device=True, forceinline=True)
        def halve(values, lane):
            kept = cuda.local.array(half, float32)
            upper = (lane & uint32(distance)) != uint32(0)
            for i in range(half):
                low = values[i] if i < here else float32(0.0)
                high = values[i + half] if i + half < here else float32(0.0)
                sent = low if upper else high
                kept[i] = (high if upper else low) + cuda.shfl_xor_sync(0xFFFFFFFF, sent, distance)
            return rest(kept, lane)

        return halve

    def total_of(distance):
        @cuda.jit(device=True, forceinline=True)
        def total(values, lane):
            x = values[0]
            if distance > 16:
                x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 16)
            if distance > 8:
                x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 8)
            if distance > 4:
                x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 4)
            if distance > 2:
                x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)
            if distance > 1:
                x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
            return x

        return total

    bits = (count - 1).bit_length()
    return step(1 << (bits - 1), 16) if bits else total_of(32)


# ---- kernels -----------------------------------------------------------------------------------------------

# rows of w that a warp takes at once, turns of each that are under way, warps of a block of threads (a power of
# two; half of the rows times the warps divides 32, the outputs of SwiGLU that make a block)
Shape = namedtuple("Shape", "rows slots warps")
RINGS = (4, 32), (5, 32), (7, 16)  # turns of one row and the warps whose registers hold them, the best first


def shape_for(card, fmt, columns, k, in_pairs=False):
    """The Shape for warps of `columns` columns of k values; in_pairs: for SwiGLU. As many turns are under way as the
    registers of a thread hold: of one row, where a ring of them goes evenly into it, since what it leaves over is not
    asked for ahead; else 2 of each of two rows, or of one 4 where they are odd, or all where they are fewer. A
    processor fetches ahead by itself."""
    if card.kind == "emulated":
        return Shape(4 if in_pairs or columns > 2 else 2, 0, 16)
    turns = k // BLOCK // fmt.turn
    if columns > 2:
        return Shape(4, 2 if columns == 4 else 1, 16)
    if columns == 1 and not in_pairs and fmt.words <= 6:
        for slots, warps in RINGS if fmt is Q8 else RINGS[:1]:  # of a packed format, 4 turns take the registers
            if turns % slots == 0:
                return Shape(1, slots, warps)
        if turns % 2:
            return Shape(1, min(turns, 4), 32)
    slots = 2 if turns > 1 and (fmt.words <= 6 or columns == 2) else 1
    return Shape(2, slots, 32 if columns == 1 or fmt is Q8 else 16)


def x_starts_of(columns):
    """Device function (x_starts, first, n_columns, k): where columns `first` and following start; past the
    last column that one once more, not stored."""
    @cuda.jit(device=True, forceinline=True)
    def set_starts(x_starts, first, n_columns, k):
        for c in range(columns):
            column = min(uint32(first + uint32(c)), uint32(n_columns - uint32(1)))
            x_starts[c] = uint32(column * uint32(k >> uint32(5)))

    return set_starts


@cache
def gemv_kernel(fmt, columns, shape, fused, planes):
    """The kernel of y <- (y +) w . x, or with `fused`, for one column, of y <- w . quantised RMSNorm of x; `planes`,
    for one column: x is put into planes. 2**set_bits warps share their rows and have `columns` columns each."""
    rows, slots, warps = shape
    threads = 32 * warps
    start, multiply_rows = ring(fmt, rows, columns, slots, planes)
    quantize_norm = norm_quantizer(store_in_planes if planes else store_quantized)
    set_starts, count = x_starts_of(columns), rows * columns
    shift = 5 - (count - 1).bit_length()  # the sum of value v is on lane v << shift
    first_lane, warp_bits = (1 << shift) - 1, warps.bit_length() - 1
    sums, raw_shape, acc_shape = lane_sums(count), (max(rows * slots, 1), fmt.words), (rows, columns)

    @cuda.jit(device=True, forceinline=True)
    def share(task, task_bits, each, extra):
        """The groups of rows of a task, from and to. A block of threads has `each`, and one more if it is of
        the first `extra`, side by side: few pages of memory. Its 2**task_bits tasks share them likewise."""
        block = uint32(cuda.blockIdx.x)
        here = uint32(each + (uint32(1) if block < extra else uint32(0)))
        for_each = uint32(here >> task_bits)
        left = uint32(here - uint32(for_each << task_bits))
        first = uint32(block * each + min(block, extra) + task * for_each + min(task, left))
        return first, uint32(first + for_each + (uint32(1) if task < left else uint32(0)))

    @cuda.jit(device=True, forceinline=True)
    def set_rows(w_rows, group, n):
        for r in range(rows):  # past the last row: that one once more, not stored
            w_rows[r] = min(uint32(group * uint32(rows) + uint32(r)), uint32(n - uint32(1)))

    @cuda.jit(device=True, forceinline=True)
    def work(raw, y, stride, wq, wd, xq, xd, n, k, add, lane, group, last, first_column, n_columns):
        acc, values = cuda.local.array(acc_shape, float32), cuda.local.array(count, float32)
        w_rows, next_rows = cuda.local.array(rows, uint32), cuda.local.array(rows, uint32)
        x_starts = cuda.local.array(columns, uint32)
        set_starts(x_starts, first_column, n_columns, k)
        value = uint32(lane >> uint32(shift))
        column = uint32(first_column + value % uint32(columns))
        while group < last:
            set_rows(w_rows, group, n)
            set_rows(next_rows, uint32(group + uint32(1)), n)
            row = uint32(group * uint32(rows) + value // uint32(columns))
            at = uint32(column * stride + row)
            stores = ((lane & uint32(first_lane)) == uint32(0) and value < uint32(count) and row < n
                      and column < n_columns)
            before = float32(0.0)
            if add and stores:
                before = y[at]
            group = uint32(group + uint32(1))
            multiply_rows(acc, raw, w_rows, next_rows, group < last, k, lane, wq, wd, x_starts, xq, xd)
            for r in range(rows):
                for c in range(columns):
                    values[r * columns + c] = acc[r, c]
            total = sums(values, lane)
            if stores:
                y[at] = before + total if add else total

    @cuda.jit(launch_bounds=(threads, 1))
    def gemv_kernel(y, stride, wq, wd, xq, xd, n, k, n_columns, set_bits, each, extra, add):
        let_next_begin()
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        task = uint32(warp >> set_bits)
        group, last = share(task, uint32(uint32(warp_bits) - set_bits), each, extra)
        set_rows(w_rows, group, n)
        if group < last:
            start(raw, w_rows, k, lane, wq, wd)
        wait_for_previous()
        first_column = uint32(uint32(warp - uint32(task << set_bits)) * uint32(columns))
        work(raw, y, stride, wq, wd, xq, xd, n, k, add, lane, group, last, first_column, n_columns)

    @cuda.jit(launch_bounds=(threads, 1))
    def planes_gemv_kernel(y, stride, wq, wd, xq, xd, n, k, n_columns, set_bits, each, extra, add):
        let_next_begin()
        q = cuda.shared.array(MAX_PLANES, int8, alignment=16)
        d = cuda.shared.array(IN_PLANES, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        group, last = share(warp, uint32(warp_bits), each, extra)
        set_rows(w_rows, group, n)
        if group < last:
            start(raw, w_rows, k, lane, wq, wd)
        wait_for_previous()
        copy_into_planes(q, d, xq, xd, k, uint32(uint32(warp << uint32(5)) + lane), uint32(threads))
        cuda.syncthreads()
        work(raw, y, stride, wq, wd, q, d, n, k, add, lane, group, last, uint32(0), uint32(1))

    @cuda.jit(launch_bounds=(threads, 1))
    def norm_gemv_kernel(y, stride, wq, wd, x, norm_w, eps, n, k, each, extra):
        let_next_begin()
        xq = cuda.shared.array(MAX_PLANES, int8, alignment=16)
        xd = cuda.shared.array(IN_PLANES, float32)
        partial = cuda.shared.array(MAX_WARPS, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        held = cuda.local.array(HELD, float32)
        hold_weights(held, norm_w, k, lane, warp, uint32(warps))  # ahead of the ring, for which they would queue
        group, last = share(warp, uint32(warp_bits), each, extra)
        set_rows(w_rows, group, n)
        if group < last:
            start(raw, w_rows, k, lane, wq, wd)
        wait_for_previous()
        quantize_norm(xq, xd, x, uint32(0), norm_w, held, k, eps, partial, lane, warp, uint32(warps))
        cuda.syncthreads()
        work(raw, y, stride, wq, wd, xq, xd, n, k, False, lane, group, last, uint32(0), uint32(1))

    return norm_gemv_kernel if fused else planes_gemv_kernel if planes else gemv_kernel


@cache
def swiglu_kernel(fmt, columns, shape, fused):
    """The kernel of (q, d) <- quantised silu(gate . x) * (up . x), or with `fused`, for one column, of the
    quantised RMSNorm of x; set_bits as above. A block of threads makes units of 32 outputs, a block of the
    quantisation of each column; a warp has the same rows of gate and of up."""
    rows, slots, warps = shape
    threads = 32 * warps
    pairs = rows // 2
    planes = fused and fmt.planes
    start, multiply_rows = ring(fmt, rows, columns, slots, planes)
    quantize_norm = norm_quantizer(store_in_planes if planes else store_quantized)
    set_starts, half = x_starts_of(columns), 1 << (pairs * columns - 1).bit_length()
    count = 2 * half  # values: gate's, as many as a power of two, and as many of up, in the other half warp
    shift = 5 - half.bit_length()
    first_lane = (1 << shift) - 1
    sums, raw_shape, acc_shape = lane_sums(count), (max(rows * slots, 1), fmt.words), (rows, columns)

    @cuda.jit(device=True, forceinline=True)
    def set_rows(w_rows, output, n):
        for p in range(pairs):
            w_rows[p], w_rows[pairs + p] = uint32(output + uint32(p)), uint32(n + output + uint32(p))

    @cuda.jit(device=True, forceinline=True)
    def work(raw, h, q, d, wq, wd, xq, xd, n, k, lane, warp, task, tasks, first_column, n_columns):
        acc, values = cuda.local.array(acc_shape, float32), cuda.local.array(count, float32)
        w_rows, next_rows = cuda.local.array(rows, uint32), cuda.local.array(rows, uint32)
        x_starts = cuda.local.array(columns, uint32)
        set_starts(x_starts, first_column, n_columns, k)
        for i in range(count):
            values[i] = float32(0.0)
        part, value = uint32(lane >> uint32(4)), uint32(uint32(lane & uint32(15)) >> uint32(shift))
        column = uint32(first_column + value % uint32(columns))
        to = uint32(uint32(column << uint32(5)) + value // uint32(columns))
        stores = ((lane & uint32(first_lane)) == uint32(0) and value < uint32(pairs * columns)
                  and column < n_columns)
        unit, side, inside = uint32(cuda.blockIdx.x), uint32(0), uint32(task * uint32(pairs))
        while uint32(unit << uint32(5)) < n:
            next_inside, next_unit = uint32(inside + tasks * uint32(pairs)), unit
            ends = next_inside >= uint32(BLOCK)
            if ends:
                next_inside, next_unit = uint32(task * uint32(pairs)), uint32(unit + cuda.gridDim.x)
            set_rows(w_rows, uint32(uint32(unit << uint32(5)) + inside), n)
            set_rows(next_rows, uint32(uint32(next_unit << uint32(5)) + next_inside), n)
            more = uint32(next_unit << uint32(5)) < n
            multiply_rows(acc, raw, w_rows, next_rows, more, k, lane, wq, wd, x_starts, xq, xd)
            for p in range(pairs):
                for c in range(columns):
                    values[p * columns + c] = acc[p, c]
                    values[half + p * columns + c] = acc[pairs + p, c]
            total = sums(values, lane)
            if stores:
                h[side, part, uint32(to + inside)] = total
            if ends:
                cuda.syncthreads()  # the next unit writes the other side of h
                if warp < n_columns:
                    finish_unit(q, d, h, side, warp, uint32(warp * uint32(n >> uint32(5)) + unit), lane)
                side = uint32(side ^ uint32(1))
            unit, inside = next_unit, next_inside

    @cuda.jit(launch_bounds=(threads, 1))
    def gemv_swiglu_kernel(q, d, wq, wd, xq, xd, n, k, n_columns, set_bits):
        let_next_begin()
        h = cuda.shared.array(H_SHAPE, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        task = uint32(warp >> set_bits)
        set_rows(w_rows, uint32(uint32(cuda.blockIdx.x << uint32(5)) + task * uint32(pairs)), n)
        start(raw, w_rows, k, lane, wq, wd)
        wait_for_previous()
        first_column = uint32(uint32(warp - uint32(task << set_bits)) * uint32(columns))
        tasks = uint32(uint32(warps) >> set_bits)
        work(raw, h, q, d, wq, wd, xq, xd, n, k, lane, warp, task, tasks, first_column, n_columns)

    @cuda.jit(launch_bounds=(threads, 1))
    def norm_gemv_swiglu_kernel(q, d, wq, wd, x, norm_w, eps, n, k):
        let_next_begin()
        xq = cuda.shared.array(MAX_PLANES, int8, alignment=16)
        xd = cuda.shared.array(IN_PLANES, float32)
        partial = cuda.shared.array(MAX_WARPS, float32)
        h = cuda.shared.array(H_SHAPE, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        held = cuda.local.array(HELD, float32)
        hold_weights(held, norm_w, k, lane, warp, uint32(warps))  # ahead of the ring, for which they would queue
        set_rows(w_rows, uint32(uint32(cuda.blockIdx.x << uint32(5)) + warp * uint32(pairs)), n)
        start(raw, w_rows, k, lane, wq, wd)
        wait_for_previous()
        quantize_norm(xq, xd, x, uint32(0), norm_w, held, k, eps, partial, lane, warp, uint32(warps))
        cuda.syncthreads()
        work(raw, h, q, d, wq, wd, xq, xd, n, k, lane, warp, warp, uint32(warps), uint32(0), uint32(1))

    return norm_gemv_swiglu_kernel if fused else gemv_swiglu_kernel


@cuda.jit(device=True, forceinline=True)
def finish_unit(q, d, h, side, column, block, lane):
    """SwiGLU of the 32 sums of a column in h, one per lane, and its values as block `block` of (q, d); 8 lanes take 4
    each."""
    at = uint32(uint32(column << uint32(5)) + lane)
    h[side, 0, at] = silu(h[side, 0, at]) * h[side, 1, at]
    cuda.syncwarp()
    at = uint32(uint32(column << uint32(5)) + uint32(uint32(lane & uint32(7)) << uint32(2)))
    w0, w1 = float_as_word(h[side, 0, at]), float_as_word(h[side, 0, uint32(at + uint32(1))])
    w2, w3 = float_as_word(h[side, 0, uint32(at + uint32(2))]), float_as_word(h[side, 0, uint32(at + uint32(3))])
    scale = block_scale(w0, w1, w2, w3)
    word = quantize_word(w0, w1, w2, w3, scale)
    if lane < uint32(8):
        store_word(q, uint32(uint32(block << uint32(5)) + uint32(lane << uint32(2))), word)
    if lane == uint32(0):
        d[block] = scale


# ---- launches: written in place, none allocates ------------------------------------------------------------

def gemv(card, fmt, y, stride, wq, wd, xq, xd, n, k, columns, add=False, stream=None):
    """y <- (y +) w . x with w = (wq, wd), n rows of k weights in format `fmt`, and x = (xq int8 [columns, k],
    xd float32 [columns, k / 32]). y: float32, n numbers of a column, `stride` from one column to the next,
    which is n or more where several products write side by side. One launch per sixteen columns."""
    y, weights, xq, xd = y.reshape(-1), _flat(wq, wd), xq.reshape(-1), xd.reshape(-1)
    for first in range(0, columns, MAX_COLUMNS):
        here, set_bits, each = _split(card, fmt, n, columns - first)
        shape = shape_for(card, fmt, each, k)
        grid, shares = _shares(n, shape, _n_blocks(card, fmt, n, k, columns, shape))
        planes = fmt.planes and columns == 1 and k <= MAX_PLANES
        card.launch(gemv_kernel(fmt, each, shape, False, planes), grid, (32, shape.warps), y[first * stride:], stride,
                    *weights, xq[first * k:], xd[first * k // BLOCK:], n, k, here, set_bits, *shares, add,
                    stream=stream)


def norm_gemv(card, fmt, y, stride, wq, wd, x, norm_w, eps, n, k, columns, xq, xd, stream=None):
    """y <- w . u, u the quantised RMSNorm of x float32 [columns, k] with weights norm_w [k]; the bits of
    rms_norm_quantize followed by `gemv`. One launch for one column; else one more, and u goes through
    xq int8 [columns, k] and xd float32 [columns, k / 32]."""
    if columns > 1 or k > MAX_FUSED:
        rms_norm_quantize(card, xq, xd, x, norm_w, columns, k, eps, stream)
        return gemv(card, fmt, y, stride, wq, wd, xq, xd, n, k, columns, stream=stream)
    shape = shape_for(card, fmt, 1, k)
    grid, shares = _shares(n, shape, card.n_sms)
    card.launch(gemv_kernel(fmt, 1, shape, True, fmt.planes), grid, (32, shape.warps), y.reshape(-1), stride,
                *_flat(wq, wd), x.reshape(-1), norm_w, float(eps), n, k, *shares, stream=stream)


def norm_gemv_swiglu(card, fmt, q, d, wq, wd, x, norm_w, eps, n, k, columns, xq, xd, stream=None):
    """q int8 [columns, n], d float32 [columns, n / 32] <- quantised silu(gate . u) * (up . u), u as above; n
    a multiple of 32. w = (wq, wd) has the n rows of gate and below them those of up. The bits of `norm_gemv`
    followed by swiglu_quantize. xq, xd as above; one launch for one column, else one per sixteen columns
    after that of the norm."""
    if n % BLOCK:
        raise ValueError(f"SwiGLU takes rows of a multiple of {BLOCK} values, not {n}")
    q, d, weights = q.reshape(-1), d.reshape(-1), _flat(wq, wd)
    grid = min(card.n_sms, n // BLOCK)
    if columns == 1 and k <= MAX_FUSED:
        shape = shape_for(card, fmt, 1, k, in_pairs=True)
        card.launch(swiglu_kernel(fmt, 1, shape, True), grid, (32, shape.warps), q, d, *weights,
                    x.reshape(-1), norm_w, float(eps), n, k, stream=stream)
        return
    rms_norm_quantize(card, xq, xd, x, norm_w, columns, k, eps, stream)
    xq, xd = xq.reshape(-1), xd.reshape(-1)
    for first in range(0, columns, MAX_COLUMNS):
        here, set_bits, each = _split(card, fmt, 2 * n, columns - first)
        shape = shape_for(card, fmt, each, k, in_pairs=True)
        card.launch(swiglu_kernel(fmt, each, shape, False), grid, (32, shape.warps), q[first * n:],
                    d[first * n // BLOCK:], *weights, xq[first * k:], xd[first * k // BLOCK:], n, k, here,
                    set_bits, stream=stream)


def gemv_q8_q8(card, y, stride, wq, wd, xq, xd, n, k, columns, add=False, stream=None):
    """`gemv` of Q8_0: wq int8 [n, k], wd float16 [n, k / 32]."""
    gemv(card, Q8, y, stride, wq, wd, xq, xd, n, k, columns, add, stream)


def _flat(wq, wd):
    return wq.reshape(-1), wd.view(np.uint16).reshape(-1)


def _split(card, fmt, n, columns):
    """(columns of the launch, log2 of the sets of warps, columns of each) for n rows: up to 8 for a warp, evenly, so
    that the weights pass from the second-level cache to the SMs once; up to 4 where that would leave warps idle, and
    up to 2 of a packed format, whose unpacked weights need registers."""
    here, most = min(columns, MAX_COLUMNS), 2
    if fmt is Q8:
        most = 8 if n >= WIDE_ROWS * card.n_sms and card.kind != "emulated" else 4
    set_bits = (-(-here // most) - 1).bit_length()
    return here, set_bits, -(-here // 2**set_bits)


def _n_blocks(card, fmt, n, k, columns, shape):
    """Blocks of threads of `gemv`: one per SM. Where launches overlap, fewer for one column, as on an SM that it leaves
    free the next launch fills its ring meanwhile: as few as need no further round of their warps, with SPARE of a round
    to spare; and, as was measured, LEAST of the SMs where one block on each would have all weights under way at once."""
    if columns > 1 or not launches_overlap(card.cc):
        return card.n_sms
    n_groups = -(-n // shape.rows)
    rounds = -(-n_groups // (shape.warps * card.n_sms))
    all_under_way = rounds == 1 and k // BLOCK // fmt.turn <= shape.slots
    needed = 0 if all_under_way else math.ceil(n_groups / shape.warps / (rounds - SPARE))
    return min(max(needed, math.ceil(LEAST * card.n_sms)), card.n_sms)


def _shares(n, shape, n_blocks):
    """The grid of up to n_blocks blocks of threads, and (groups of rows for each of them, blocks that take one more)."""
    n_groups = -(-n // shape.rows)
    grid = min(n_blocks, n_groups)
    return grid, divmod(n_groups, grid)


# ---- check and time ----------------------------------------------------------------------------------------

# n, k, columns
CASES = [(1, 32, 1), (4, 320, 1), (33, 512, 2), (31, 544, 3), (500, 1024, 8), (63, 2080, 11), (1024, 1024, 1)]


def random_q8(rng, rows, k):
    """Weights as a Q8_0 tensor has them: q int8 [rows, k], d float16 [rows, k / 32] of either sign."""
    q = rng.integers(-128, 128, (rows, k), np.int8)
    return q, (rng.standard_normal((rows, k // BLOCK)) / 1000).astype(np.float16)


def random_activations(rng, rows, k):
    """Quantised activations: q int8 [rows, k], d float32 [rows, k / 32]."""
    return rng.integers(-127, 128, (rows, k), np.int8), rng.random((rows, k // BLOCK), np.float32)


def check(card, n, k, columns, add=False):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the
    chain of a lane, five additions of the butterfly, the product of the scales and the addition to y, 2**-24
    of the sum of magnitudes each."""
    rng = np.random.default_rng((n, k, columns))
    (wq, wd), (xq, xd) = random_q8(rng, n, k), random_activations(rng, columns, k)
    before = rng.standard_normal((columns, n), np.float32)
    y = card.alloc((columns + 1, n + 3), np.float32)      # numbers before and behind, and a column too many
    card.poison(y)
    if add:
        card.copy_in(y[:columns], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    gemv_q8_q8(card, y.reshape(-1)[1:], n + 3, *map(card.upload, (wq, wd, xq, xd)), n, k, columns, add)
    y = card.download(y)
    got = y[:columns, 1:n + 1].copy()
    y[:columns, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    magnitude = q8_reference(abs(wq.astype(int)), abs(wd), abs(xq.astype(int)), xd) + abs(before) * add
    bound = (k // 512 + 2 + 7) * 2.0**-24 * magnitude
    error = (abs(got - (q8_reference(wq, wd, xq, xd) + before * add)) / bound).max()
    assert error <= 1
    return error


# n, k, columns
FUSED_CASES = [(32, 1024, 1), (64, 32, 1), (96, 2080, 1), (160, 1056, 3), (96, 1536, 19)]


def check_fused(card, n, k, columns, fmt=Q8, w=None):
    """norm_gemv and norm_gemv_swiglu against the kernels that they stand for, bit for bit; returns 0, the
    error. w: the 2 n rows of weights in format `fmt`, on the card, if not of Q8_0."""
    rng = np.random.default_rng((n, k, columns))
    w = w or [card.upload(part) for part in random_q8(rng, 2 * n, k)]
    x, norm_w = (card.upload(rng.standard_normal(shape, np.float32)) for shape in ((columns, k), k))
    xq, xd, want_xq, want_xd = (card.alloc(*like) for like in 2 * _quantised_like(columns, k))
    q, d, want_q, want_d = (card.alloc(*like) for like in 2 * _quantised_like(columns + 1, n))
    y, want_y = card.alloc((columns + 1, 2 * n), np.float32), card.alloc((columns + 1, 2 * n), np.float32)
    for array in (xq, xd, q, d, want_q, want_d, y, want_y):
        card.poison(array)
    norm = x, norm_w, 1e-6
    rms_norm_quantize(card, want_xq, want_xd, x, norm_w, columns, k, 1e-6)
    gemv(card, fmt, want_y, 2 * n, *w, want_xq, want_xd, 2 * n, k, columns)
    swiglu_quantize(card, want_q, want_d, want_y, columns, n)
    norm_gemv(card, fmt, y, 2 * n, *w, *norm, 2 * n, k, columns, xq, xd)
    norm_gemv_swiglu(card, fmt, q, d, *w, *norm, n, k, columns, xq, xd)
    for got, want in ((y, want_y), (q, want_q), (d, want_d)):
        np.testing.assert_array_equal(card.download(got), card.download(want))
    return 0.0


def _quantised_like(rows, k):
    return ((rows, k), np.int8), ((rows, k // BLOCK), np.float32)


TIMED = [(256, 256, 1), (1024, 1024, 1), (4096, 4096, 1), (65536, 5120, 1), (4096, 4096, 2), (4096, 4096, 4),
         (4096, 4096, 8)]


def cases(card):
    """The checks, then times; the largest matrix (356 MB) is beyond every cache."""
    for case in CASES:
        yield Case("{} x {}, {} columns".format(*case), partial(check, card, *case))
    for case in FUSED_CASES:
        yield Case("fused: {} x {}, {} columns".format(*case), partial(check_fused, card, *case))
    for n, k, columns in TIMED:
        wq, wd = card.zeros((n, k), np.int8), card.zeros((n, k // BLOCK), np.float16)
        xq, xd = card.zeros((columns, k), np.int8), card.zeros((columns, k // BLOCK), np.float32)
        y = card.alloc((columns, n), np.float32)
        yield Case(f"time of {n} x {k}, {columns} columns",
                   launch=partial(gemv_q8_q8, card, y, n, wq, wd, xq, xd, n, k, columns),
                   n_bytes=sum(a.nbytes for a in (wq, wd, xq, xd, y)), n_ops=2 * n * k * columns, pipe="dp4a")


if __name__ == "__main__":
    main("Q8_0 matrix x vectors", cases)
