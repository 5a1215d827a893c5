"""The products of a mixture of experts in decode steps: each row of a step with the experts that its router chose.

    expert_gemv     y[p] = w[e] . x[row]                                            for every pair p of (row, rank)
    expert_swiglu   inner[p] = quantised silu(gate[e] . u[row]) * (up[e] . u[row])
    expert_down     x[row] += combined y[p] = down[e] . inner[p] of the row's pairs

    e = experts[row, rank]      p = row * n_used + rank       of a Choice (kernels/records.py)

    combined:   acc = 0;  acc = fma(weights[row, rank], y[p], acc) in the order of rank;
                acc = fma(weights[row, n_used], y of the shared expert, acc), if there is one;  x[row] = x[row] + acc

The shared expert is a part of the two latter launches. So a layer's MLP is three launches: norm and router
(kernels/route.py), expert_swiglu, expert_down.

Each product has the bits of kernels/q8_gemv.py, which holds the order of additions, the decoders of the weight formats
and the parts of kernels that are used here. So a result depends neither on the other rows nor on the card.

Where an expert lies is data: `places` of an Experts record (kernels/operands.py) has addresses, of the card's memory or
of host memory that the card reads. An expert whose place is (0, 0) is out of reach: expert_gemv and expert_swiglu leave
its results as they are. With a HostRequest (kernels/host_requests.py), expert_swiglu asks the host for y[p], and
expert_down waits for it; without one, y[p] is NaN. Each has a kernel for either case.

    grid of expert_gemv       32 rows of an expert         x  pairs
    grid of expert_swiglu     a block of 32 outputs        x  ranks, the shared expert first  x  rows
                              and a block more, which asks
    grid of expert_down       8 to 32 numbers of a row     x  rows

  * A block of threads of expert_swiglu makes one block of the quantisation. There are more of them than SMs, some SMs
    have two, and those have twice as many loads under way.
  * A block of threads of expert_down computes the same numbers of y for all experts of its row. They meet in shared
    memory, where one thread for each number combines them.
  * Rows of 16 blocks (k = 512) are narrow. Two of them make a tile of 32 blocks, so that all lanes have work. Each
    keeps its own chains; adding the empty chains of a row is adding 0.
  * Before it waits for the launch in front of it, expert_swiglu loads first weights of the shared expert, and
    expert_down those of its first expert (where launches overlap: kernels/intrinsics.py). The choice is there by then,
    because expert_swiglu and expert_gemv wait for the router before they let expert_down begin. So one of them stands
    between the router and expert_down.

Pipe: dp4a, but bound by memory: 1.06 n k bytes for each pair in Q8_0. Rows that chose the same expert read it from the
second-level cache, each for itself.
"""

import itertools
import math
from collections import namedtuple
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int8, int32, uint32, uint64

from kernels import quant_gemv
from kernels.bench import Case, main
from kernels.emulated.serving import MAIL_WORDS
from kernels.formats import BLOCK, FORMATS, on_card, random_raw
from kernels.formats.format import no_book
from kernels.host_requests import ARRIVED, HostRequest, arrives_last, finish_row, hand_over_of
from kernels.intrinsics import array_at, let_next_begin, load_past_l1, prefetch, wait_for_previous, warp_number
from kernels.operands import Experts, Matrix, Quantized
from kernels.q8_gemv import (H_OF_ONE, IN_PLANES, MAX_PLANES, TILE, Decoder, copy_into_planes, flat_weights,
                             fma_reference, gemv, narrow_tree, random_activations, ring, tree)
from kernels.records import Choice
from kernels.swiglu import finish_unit, swiglu_quantize

ROWS = 32               # rows of an expert for a block of threads of expert_gemv
MAX_RANKS = 33          # experts of a row, with the shared one
MAX_OUTPUTS = 32        # of a block of threads of expert_down
RESULTS = MAX_RANKS * MAX_OUTPUTS
WARPS, BLOCKS = 16, 2   # warps of a block of threads, and blocks of an SM: 64 registers for each thread
DOWN_WARPS = 12         # of expert_down, at most
RESIDENT = 28           # warps of expert_down on an SM, at most: at least 72 registers for each thread
NARROW = TILE // 2 * BLOCK      # k of rows of which two make a tile
LINE_BITS = 4           # of places, 8 bytes each, in 128 bytes of memory
NAN = float("nan")


# As in kernels/q8_gemv.py. narrow: two rows of 16 blocks make a tile; `rows` counts tiles, and depth and whole are for
# the others.
Shape = namedtuple("Shape", "rows depth warps whole narrow")


class SharedExpert(NamedTuple):
    """The shared expert in a step.

    decoder   of the format of w
    w         Matrix: for expert_swiglu [2 F, H], the F rows of gate and below them those of up; for expert_down [H, F]
    inner     Quantized [rows, F], which expert_swiglu writes and expert_down reads
    """

    decoder: Decoder
    w: Matrix
    inner: Quantized


# ---- reference ---------------------------------------------------------------------------------------------

def combine_reference(x, y, weights, shared=None):
    """float32 [rows, H], bit for bit: x [rows, H] plus the weighted sum of y [rows, n_used, H] in the order of rank,
    and of shared [rows, H]. weights: float32 [rows, n_used + 1]."""
    acc = np.zeros_like(x)
    for rank in range(y.shape[1]):
        acc = fma_reference(weights[:, rank, None], y[:, rank], acc)
    if shared is not None:
        acc = fma_reference(weights[:, -1, None], shared, acc)
    return x + acc


# ---- parts of the kernels ----------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def place_of_expert(places, expert):
    """(address of the codes, address of the scales); 0: out of reach."""
    at = uint32(uint32(expert) << uint32(1))
    return places[at], places[uint32(at + uint32(1))]


def rows_functions(decoder, shape):
    """Device functions (start, finish) with which a warp multiplies rows of w [n, k] by a column, as many at a time as
    `rows_of` says.

    start(raw, first, wq, wd, n, k, lane): starts the loads of the rows from `first` on into raw, as long as `raw_of`.
    finish(results, to, raw, book, first, wq, wd, xq, xd, x_start, n, k, lane): multiplies them by the column that
    starts at block x_start and stores the results from results[to] on; of rows past the last one it stores nothing."""
    rows, tile_rows = shape.rows, 2 if shape.narrow else 1
    start_ring, multiply_rows = ring(decoder, rows, 1, shape, False)
    fetch_two, multiply_two = decoder.narrow(rows)
    sums = narrow_tree(rows, decoder.apart) if shape.narrow else tree(rows, decoder.apart)
    place_of, narrow, chain_bits = decoder.place, shape.narrow, 4 if shape.narrow else 5
    shift = chain_bits - (rows - 1).bit_length()
    first_chain, acc_shape = (1 << shift) - 1, (rows, 1)

    @cuda.jit(device=True, forceinline=True)
    def set_rows(w_rows, first, n):
        for r in range(rows):  # rows past the last one are replaced by the last one, and not stored
            w_rows[r] = min(uint32(first + uint32(tile_rows * r)), uint32(n - uint32(tile_rows)))

    @cuda.jit(device=True, forceinline=True)
    def start(raw, first, wq, wd, n, k, lane):
        w_rows = cuda.local.array(rows, uint32)
        set_rows(w_rows, first, n)
        if narrow:
            for r in range(rows):
                fetch_two(raw, r, w_rows[r], lane, wq, wd)
            cuda.syncwarp()  # the loads stay here, as in `ring`
        else:
            start_ring(raw, w_rows, k, lane, wq, wd)

    @cuda.jit(device=True, forceinline=True)
    def finish(results, to, raw, book, first, wq, wd, xq, xd, x_start, n, k, lane):
        acc, values = cuda.local.array(acc_shape, float32), cuda.local.array(rows, float32)
        w_rows, x_starts = cuda.local.array(rows, uint32), cuda.local.array(1, uint32)
        x_starts[0] = x_start
        if narrow:
            for r in range(rows):
                acc[r, 0] = float32(0.0)
            multiply_two(acc, raw, lane, x_starts, xq, xd, book)
        else:
            set_rows(w_rows, first, n)
            multiply_rows(acc, raw, w_rows, w_rows, False, k, lane, wq, wd, x_starts, xq, xd, book)
        for r in range(rows):
            values[r] = acc[r, 0]
        place = place_of(lane)
        value, total = uint32(place >> uint32(shift)), sums(values, place)
        if narrow:
            value = uint32(uint32(uint32(value & uint32(rows - 1)) << uint32(1)) + uint32(place >> uint32(4)))
        if place & uint32(first_chain) == uint32(0) and value < uint32(tile_rows * rows) and uint32(first + value) < n:
            results[uint32(to + value)] = total

    return start, finish


def rows_of(shape):
    """Rows of w that a warp multiplies at a time."""
    return shape.rows * (2 if shape.narrow else 1)


def raw_of(decoder, shape):
    """Shape of the registers for words of w that are under way."""
    return max(shape.rows * (1 if shape.narrow else shape.depth), 1), decoder.words


def unit_functions(decoder, shape):
    """Device functions (start, finish) with which a block of threads computes 32 outputs, a unit of the n of gate_up
    [2 n, k], for one column.

    start(raw, unit, wq, wd, n, k, lane, warp): starts the first loads into raw, as long as `raw_of`.
    finish(q, d, block, h, planes, raw, book, unit, wq, wd, xq, xd, x_start, n, k, lane, warp): multiplies by the column
    that starts at block x_start, and stores the outputs as block `block` of (q, d). h, planes: shared memory, float32
    of shape H_OF_ONE and the column in planes, (xq, xd)."""
    rows, _, warps, _, _ = shape
    pairs, in_planes = rows // 2, decoder.planes
    start_ring, multiply_rows = ring(decoder, rows, 1, shape, in_planes)
    half = 1 << (pairs - 1).bit_length()
    count = 2 * half  # values of gate, padded to a power of two, then those of up: their sums go to chains 16 .. 31
    shift = 5 - half.bit_length()
    first_chain, acc_shape = (1 << shift) - 1, (rows, 1)
    sums, place_of = tree(count, decoder.apart), decoder.place

    @cuda.jit(device=True, forceinline=True)
    def set_rows(w_rows, unit, inside, n):
        output = uint32(uint32(unit << uint32(5)) + inside)
        for p in range(pairs):
            w_rows[p], w_rows[pairs + p] = uint32(output + uint32(p)), uint32(n + output + uint32(p))

    @cuda.jit(device=True, forceinline=True)
    def start(raw, unit, wq, wd, n, k, lane, warp):
        w_rows = cuda.local.array(rows, uint32)
        set_rows(w_rows, unit, uint32(warp * uint32(pairs)), n)
        start_ring(raw, w_rows, k, lane, wq, wd)

    @cuda.jit(device=True, forceinline=True)
    def work(h, raw, book, unit, wq, wd, xq, xd, x_start, n, k, lane, warp):
        acc, values = cuda.local.array(acc_shape, float32), cuda.local.array(count, float32)
        w_rows, next_rows = cuda.local.array(rows, uint32), cuda.local.array(rows, uint32)
        x_starts = cuda.local.array(1, uint32)
        x_starts[0] = x_start
        for i in range(count):
            values[i] = float32(0.0)
        place = place_of(lane)
        part, value = uint32(place >> uint32(4)), uint32(uint32(place & uint32(15)) >> uint32(shift))
        stores = place & uint32(first_chain) == uint32(0) and value < uint32(pairs)
        inside = uint32(warp * uint32(pairs))
        while inside < uint32(BLOCK):
            after = uint32(inside + uint32(warps * pairs))
            set_rows(w_rows, unit, inside, n)
            set_rows(next_rows, unit, after, n)
            multiply_rows(acc, raw, w_rows, next_rows, after < uint32(BLOCK), k, lane, wq, wd, x_starts, xq, xd, book)
            for p in range(pairs):
                values[p], values[half + p] = acc[p, 0], acc[pairs + p, 0]
            total = sums(values, place)
            if stores:
                h[0, part, uint32(inside + value)] = total
            inside = after

    @cuda.jit(device=True, forceinline=True)
    def finish(q, d, block, h, planes, raw, book, unit, wq, wd, xq, xd, x_start, n, k, lane, warp):
        if in_planes:
            thread = uint32(uint32(warp << uint32(5)) + lane)
            copy_into_planes(planes[0], planes[1], xq, xd, x_start, k, thread, uint32(32 * warps))
            cuda.syncthreads()
            work(h, raw, book, unit, wq, wd, planes[0], planes[1], uint32(0), n, k, lane, warp)
        else:
            work(h, raw, book, unit, wq, wd, xq, xd, x_start, n, k, lane, warp)
        cuda.syncthreads()
        if warp == uint32(0):
            finish_unit(q, d, h, uint32(0), uint32(0), block, lane)

    return start, finish


# ---- kernels -----------------------------------------------------------------------------------------------
# All of them wait before they let the next launch begin. So when the launch behind one of them begins, the router in
# front of it has ended: expert_down reads the choice before it waits for the results of expert_swiglu.

@cache
def gemv_kernel(decoder, shape):
    """The kernel of y <- w . x for every pair."""
    (start, finish), load_book = rows_functions(decoder, shape), decoder.load_book
    rows, warps, raw_shape = rows_of(shape), shape.warps, raw_of(decoder, shape)

    @cuda.jit(launch_bounds=(32 * warps, BLOCKS))
    def expert_gemv_kernel(y, stride, wq, wd, places, experts, xq, xd, n, k, per_x):
        """Grid (n / ROWS, pairs). Pairs per_x * i to per_x * i + per_x - 1 read column i."""
        lane, warp, pair = uint32(cuda.threadIdx.x), warp_number(), uint32(cuda.blockIdx.y)
        raw = cuda.local.array(raw_shape, uint32)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(32 * warps))
        wait_for_previous()
        let_next_begin()
        codes, scales = place_of_expert(places, experts[pair])
        if codes == uint64(0):
            return
        here_q, here_d = array_at(codes, wq), array_at(scales, wd)
        x_start = uint32(uint32(pair // per_x) * uint32(k >> uint32(5)))
        first = uint32(uint32(cuda.blockIdx.x) * uint32(ROWS))
        to, last = uint32(pair * stride), min(n, uint32(first + uint32(ROWS)))
        first = uint32(first + warp * uint32(rows))
        while first < last:
            start(raw, first, here_q, here_d, n, k, lane)
            finish(y, uint32(to + first), raw, book, first, here_q, here_d, xq, xd, x_start, n, k, lane)
            first = uint32(first + uint32(warps * rows))

    return expert_gemv_kernel


@cache
def swiglu_kernel(decoder, shape, shared_decoder, shared_shape, asks):
    """The kernel of expert_swiglu. shared_decoder: None without a shared expert. Both shapes have the same warps. asks:
    whether it asks the host for experts that are out of reach."""
    (start, finish), load_book = unit_functions(decoder, shape), decoder.load_book
    warps, raw_shape, has_shared = shape.warps, raw_of(decoder, shape), shared_decoder is not None
    other, other_shape = (shared_decoder, shared_shape) if has_shared else (decoder, shape)
    (start_shared, finish_shared), load_shared_book = unit_functions(other, other_shape), other.load_book
    shared_raw_shape, hand_over = raw_of(other, other_shape), hand_over_of(warps)
    blocks = BLOCKS if shape.whole else 1  # the last blocks of a row that is not whole tiles take more registers
    plane_bytes, plane_floats = (MAX_PLANES, IN_PLANES) if decoder.planes or other.planes else (16, 1)

    @cuda.jit(device=True, forceinline=True)
    def begin(shared_raw, places, shared_wq, shared_wd, shared_n, k, lane, warp):
        """What needs no choice: starts loads of the shared expert, or brings the places near. Returns the book."""
        thread, threads = uint32(uint32(warp << uint32(5)) + lane), uint32(32 * warps)
        unit, book = uint32(cuda.blockIdx.x), uint64(0)
        if has_shared and uint32(cuda.blockIdx.y) == uint32(0):
            if unit < uint32(shared_n >> uint32(5)):
                start_shared(shared_raw, unit, shared_wq, shared_wd, shared_n, k, lane, warp)
                book = load_shared_book(thread, threads)
        else:
            if uint32(thread << uint32(LINE_BITS)) < uint32(places.size):
                prefetch(places, uint32(thread << uint32(LINE_BITS)))
            book = load_book(thread, threads)
        return book

    @cuda.jit(device=True, forceinline=True)
    def multiply(shared_raw, book, q, d, wq, wd, places, experts, xq, xd, n, k, n_used, shared_q, shared_d, shared_wq,
                 shared_wd, shared_n, lane, warp):
        """What this block of threads has to compute: 32 outputs of a pair or of the shared expert, or nothing."""
        planes = (cuda.shared.array(plane_bytes, int8, alignment=16), cuda.shared.array(plane_floats, float32))
        h, raw = cuda.shared.array(H_OF_ONE, float32), cuda.local.array(raw_shape, uint32)
        unit, rank, row = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        x_start, units = uint32(row * uint32(k >> uint32(5))), uint32(n >> uint32(5))
        if has_shared:
            if rank == uint32(0):
                shared_units = uint32(shared_n >> uint32(5))
                if unit < shared_units:
                    finish_shared(shared_q, shared_d, uint32(row * shared_units + unit), h, planes, shared_raw, book,
                                  unit, shared_wq, shared_wd, xq, xd, x_start, shared_n, k, lane, warp)
                return
            rank = uint32(rank - uint32(1))
        pair = uint32(row * n_used + rank)
        codes, scales = place_of_expert(places, experts[pair])
        if unit < units and codes != uint64(0):
            here_q, here_d = array_at(codes, wq), array_at(scales, wd)
            start(raw, unit, here_q, here_d, n, k, lane, warp)
            finish(q, d, uint32(pair * units + unit), h, planes, raw, book, unit, here_q, here_d, xq, xd, x_start, n, k,
                   lane, warp)

    @cuda.jit(launch_bounds=(32 * warps, blocks))
    def expert_swiglu_kernel(q, d, wq, wd, places, experts, xq, xd, n, k, n_used, shared_q, shared_d, shared_wq,
                             shared_wd, shared_n):
        """Grid (units of 32 outputs, ranks, rows); with a shared expert, it comes before the first rank. Its loads
        start before the choice is known."""
        lane, warp, shared_raw = uint32(cuda.threadIdx.x), warp_number(), cuda.local.array(shared_raw_shape, uint32)
        book = begin(shared_raw, places, shared_wq, shared_wd, shared_n, k, lane, warp)
        wait_for_previous()
        let_next_begin()
        multiply(shared_raw, book, q, d, wq, wd, places, experts, xq, xd, n, k, n_used, shared_q, shared_d, shared_wq,
                 shared_wd, shared_n, lane, warp)

    @cuda.jit(launch_bounds=(32 * warps, blocks))
    def asking_swiglu_kernel(q, d, wq, wd, places, experts, xq, xd, n, k, n_used, shared_q, shared_d, shared_wq,
                             shared_wd, shared_n, weights, words, wanted, stride, to_q, to_d, state, layer, n_experts):
        """The same with a unit more, whose first block asks the host."""
        lane, warp, shared_raw = uint32(cuda.threadIdx.x), warp_number(), cuda.local.array(shared_raw_shape, uint32)
        book = begin(shared_raw, places, shared_wq, shared_wd, shared_n, k, lane, warp)
        wait_for_previous()
        let_next_begin()
        if uint32(cuda.blockIdx.x) < uint32(cuda.gridDim.x - 1):
            multiply(shared_raw, book, q, d, wq, wd, places, experts, xq, xd, n, k, n_used, shared_q, shared_d,
                     shared_wq, shared_wd, shared_n, lane, warp)
        elif uint32(cuda.blockIdx.y) == uint32(0) and uint32(cuda.blockIdx.z) == uint32(0):
            hand_over(experts, places, xq, xd, uint32(cuda.gridDim.z), n_used, k, weights, words, wanted, stride, to_q,
                      to_d, state, layer, n_experts, lane, warp)

    return asking_swiglu_kernel if asks else expert_swiglu_kernel


@cache
def down_kernel(decoder, shape, shared_decoder, shared_shape, has_rows, asks):
    """The kernel of expert_down. shared_decoder: None without a shared expert's matrix. has_rows: whether the shared
    expert's results are given instead. Both shapes have the same warps. asks: whether experts that are out of reach
    have been asked for."""
    (start, finish), load_book = rows_functions(decoder, shape), decoder.load_book
    rows, warps, raw_shape, has_shared = rows_of(shape), shape.warps, raw_of(decoder, shape), shared_decoder is not None
    other, other_shape = (shared_decoder, shared_shape) if has_shared else (decoder, shape)
    start_shared, finish_shared = rows_functions(other, other_shape)
    shared_rows, shared_raw_shape = rows_of(other_shape), raw_of(other, other_shape)
    load_shared_book = other.load_book if has_shared else no_book
    row_bits, shared_bits = rows.bit_length() - 1, shared_rows.bit_length() - 1

    @cuda.jit(device=True, forceinline=True)
    def place_of_item(item, row, n_used, output_bits, places, experts):
        """(its number in `results`, pair, codes, scales)."""
        to = uint32(item << uint32(row_bits))
        pair = uint32(row * n_used + uint32(to >> output_bits))
        codes, scales = place_of_expert(places, load_past_l1(experts, pair))
        return to, pair, codes, scales

    @cuda.jit(device=True, forceinline=True)
    def begin(raw, shared_raw, wq, wd, places, experts, n, k, n_used, output_bits, shared_wq, shared_wd, shared_k, lane,
              warp):
        """Starts the loads of the warp's first item. Returns (what `place_of_item` says of it, both books)."""
        row, first = uint32(cuda.blockIdx.y), uint32(uint32(cuda.blockIdx.x) << output_bits)
        thread, inside = uint32(uint32(warp << uint32(5)) + lane), uint32(uint32(uint32(1) << output_bits) - uint32(1))
        items, shared_items = uint32(uint32(n_used << output_bits) >> uint32(row_bits)), uint32(0)
        if has_shared:
            shared_items = uint32(uint32(inside + uint32(1)) >> uint32(shared_bits))
        to, pair, codes, scales = uint32(0), uint32(0), uint64(0), uint64(0)
        if has_shared and warp < shared_items:
            here = uint32(first + warp * uint32(shared_rows))
            start_shared(shared_raw, here, shared_wq, shared_wd, n, shared_k, lane)
        elif uint32(warp - shared_items) < items:
            to, pair, codes, scales = place_of_item(uint32(warp - shared_items), row, n_used, output_bits, places,
                                                    experts)
            if codes != uint64(0):
                here = uint32(first + uint32(to & inside))
                start(raw, here, array_at(codes, wq), array_at(scales, wd), n, k, lane)
        book = load_book(thread, uint32(32 * warps))
        return to, pair, codes, scales, book, load_shared_book(thread, uint32(32 * warps))

    @cuda.jit(device=True, forceinline=True)
    def multiply(results, raw, shared_raw, begun, wq, wd, places, experts, xq, xd, n, k, n_used, output_bits, shared_wq,
                 shared_wd, shared_xq, shared_xd, shared_k, lane, warp):
        """results[rank << output_bits + i] <- number i of this block of each product, the shared expert's last; NaN
        where the expert is out of reach. Returns whether this warp met such an expert."""
        row, first = uint32(cuda.blockIdx.y), uint32(uint32(cuda.blockIdx.x) << output_bits)
        inside, items = uint32(uint32(uint32(1) << output_bits) - uint32(1)), uint32(n_used << output_bits)
        items, shared_items = uint32(items >> uint32(row_bits)), uint32(0)
        to, pair, codes, scales, book, shared_book = begun
        item, lacks = warp, False
        if has_shared:
            shared_items = uint32(uint32(inside + uint32(1)) >> uint32(shared_bits))
            x_start = uint32(row * uint32(shared_k >> uint32(5)))
            while item < shared_items:
                at = uint32(item * uint32(shared_rows))
                if item != warp:
                    start_shared(shared_raw, uint32(first + at), shared_wq, shared_wd, n, shared_k, lane)
                finish_shared(results, uint32(uint32(n_used << output_bits) + at), shared_raw, shared_book,
                              uint32(first + at), shared_wq, shared_wd, shared_xq, shared_xd, x_start, n, shared_k,
                              lane)
                item = uint32(item + uint32(warps))
        starts = item == warp
        item = uint32(item - shared_items)
        while item < items:
            here = uint32(first + uint32(uint32(item << uint32(row_bits)) & inside))
            if not starts:
                to, pair, codes, scales = place_of_item(item, row, n_used, output_bits, places, experts)
                if codes != uint64(0):
                    start(raw, here, array_at(codes, wq), array_at(scales, wd), n, k, lane)
            starts = False
            if codes != uint64(0):
                finish(results, to, raw, book, here, array_at(codes, wq), array_at(scales, wd), xq, xd,
                       uint32(pair * uint32(k >> uint32(5))), n, k, lane)
            else:
                lacks = True
                if lane < uint32(rows):
                    results[uint32(to + lane)] = float32(NAN)
            item = uint32(item + uint32(warps))
        return lacks

    @cuda.jit(device=True, forceinline=True)
    def combine(x, weights, results, n, n_used, output_bits, shared, thread):
        """Adds up this block's numbers of the row."""
        row, i = uint32(cuda.blockIdx.y), uint32(uint32(uint32(cuda.blockIdx.x) << output_bits) + thread)
        if thread < uint32(uint32(1) << output_bits) and i < n:
            total, weight_at = float32(0.0), uint32(row * uint32(n_used + uint32(1)))
            at = uint32(row * n + i)
            for rank in range(n_used):
                y = results[uint32(uint32(uint32(rank) << output_bits) + thread)]
                total = cuda.fma(weights[uint32(weight_at + uint32(rank))], y, total)
            if has_shared:
                y = results[uint32(uint32(n_used << output_bits) + thread)]
                total = cuda.fma(weights[uint32(weight_at + n_used)], y, total)
            if has_rows:
                total = cuda.fma(weights[uint32(weight_at + n_used)], shared[at], total)
            x[at] = x[at] + total

    @cuda.jit(device=True, forceinline=True)
    def keep(products, results, n, n_used, output_bits, shared, thread):
        """Stores this block's numbers for the block that adds up the row."""
        row, i = uint32(cuda.blockIdx.y), uint32(uint32(uint32(cuda.blockIdx.x) << output_bits) + thread)
        if thread < uint32(uint32(1) << output_bits) and i < n:
            at = uint32(uint32(row * uint32(n_used + uint32(1))) * n + i)
            for rank in range(uint32(n_used + uint32(has_shared))):
                products[uint32(at + uint32(rank) * n)] = results[uint32(uint32(uint32(rank) << output_bits) + thread)]
            if has_rows:
                products[uint32(at + n_used * n)] = shared[uint32(row * n + i)]

    @cuda.jit(launch_bounds=(32 * warps, RESIDENT // warps))
    def expert_down_kernel(x, wq, wd, places, experts, weights, xq, xd, n, k, n_used, output_bits, shared, shared_wq,
                           shared_wd, shared_xq, shared_xd, shared_k):
        """Grid (n / outputs, rows), outputs = 2**output_bits. An item of work is a group of rows of an expert; a warp
        takes every warps-th, those of the shared expert first. The loads of its first item start before it waits."""
        results, lane, warp = cuda.shared.array(RESULTS, float32), uint32(cuda.threadIdx.x), warp_number()
        raw, shared_raw = cuda.local.array(raw_shape, uint32), cuda.local.array(shared_raw_shape, uint32)
        begun = begin(raw, shared_raw, wq, wd, places, experts, n, k, n_used, output_bits, shared_wq, shared_wd,
                      shared_k, lane, warp)
        wait_for_previous()
        let_next_begin()
        multiply(results, raw, shared_raw, begun, wq, wd, places, experts, xq, xd, n, k, n_used, output_bits, shared_wq,
                 shared_wd, shared_xq, shared_xd, shared_k, lane, warp)
        cuda.syncthreads()
        combine(x, weights, results, n, n_used, output_bits, shared, uint32(uint32(warp << uint32(5)) + lane))

    @cuda.jit(launch_bounds=(32 * warps, RESIDENT // warps))
    def asking_down_kernel(x, wq, wd, places, experts, weights, xq, xd, n, k, n_used, output_bits, shared, shared_wq,
                           shared_wd, shared_xq, shared_xd, shared_k, products, answer, words, state, layer,
                           milliseconds):
        """The same; `answer` has the host's results for rows with an expert out of reach."""
        results, lane, warp = cuda.shared.array(RESULTS, float32), uint32(cuda.threadIdx.x), warp_number()
        raw, shared_raw = cuda.local.array(raw_shape, uint32), cuda.local.array(shared_raw_shape, uint32)
        begun = begin(raw, shared_raw, wq, wd, places, experts, n, k, n_used, output_bits, shared_wq, shared_wd,
                      shared_k, lane, warp)
        wait_for_previous()
        let_next_begin()
        lacks = multiply(results, raw, shared_raw, begun, wq, wd, places, experts, xq, xd, n, k, n_used, output_bits,
                         shared_wq, shared_wd, shared_xq, shared_xd, shared_k, lane, warp)
        thread, row = uint32(uint32(warp << uint32(5)) + lane), uint32(cuda.blockIdx.y)
        if cuda.syncthreads_count(int32(lacks)) == 0:
            combine(x, weights, results, n, n_used, output_bits, shared, thread)
            return
        keep(products, results, n, n_used, output_bits, shared, thread)
        if arrives_last(state, row, uint32(cuda.gridDim.x), thread):
            n_ranks = uint32(n_used + uint32(has_shared or has_rows))
            finish_row(x, weights, experts, places, row, n, n_used, n_ranks, products, answer, words, state, layer,
                       milliseconds, thread, 32 * warps)

    return asking_down_kernel if asks else expert_down_kernel


# ---- launches: they write in place and never allocate -----------------------------------------------------

def expert_gemv(card, decoder, y, stride, w, x, choice, n_rows, *, from_pairs=False, stream=None):
    """y <- the product of every pair of a step of n_rows rows; pair p has w.n numbers from p * stride on.

    decoder: of the format of w, Experts of [n, k]. y: float32. x: Quantized, a column of k values for each row; with
    `from_pairs` for each pair. choice: a Choice. Pairs whose expert is out of reach keep what they have."""
    shape, n_used = shape_of(card, decoder, w.k, w.n), choice.n_used
    card.launch(gemv_kernel(decoder, shape), (-(-w.n // ROWS), n_rows * n_used), (32, shape.warps), y.reshape(-1),
                stride, *_of_experts(w, choice), *x.flat, w.n, w.k, 1 if from_pairs else n_used, stream=stream)


def expert_swiglu(card, decoder, out, w, u, choice, n_rows, shared=None, *, request=None, stream=None):
    """out <- quantised silu(gate . u) * (up . u) of every pair: the bits of expert_gemv followed by swiglu_quantize.

    w: Experts of [2 n, k], the n rows of gate and below them those of up; n a multiple of 32. out: Quantized
    [pairs, n]. u: Quantized [n_rows, k]. shared: a SharedExpert, whose `inner` is written too. Pairs whose expert is
    out of reach keep what they have; request, a HostRequest, asks the host for their products. ValueError: n is no
    multiple of 32, or k is larger than MAX_PLANES."""
    sizes = [w.n // 2] + ([shared.w.n // 2] if shared else [])
    if any(n % BLOCK for n in sizes):
        raise ValueError(f"SwiGLU takes rows of a multiple of {BLOCK} values, not {sizes}")
    if w.k > MAX_PLANES:
        raise ValueError(f"rows of experts have up to {MAX_PLANES} values, not {w.k}")
    shape = shape_of(card, decoder, w.k, in_pairs=True)
    shared_shape = shape_of(card, shared.decoder, w.k, in_pairs=True) if shared else None
    kernel = swiglu_kernel(decoder, shape, shared.decoder if shared else None, shared_shape, request is not None)
    x, matrix = (shared.inner, shared.w) if shared else (out, w.home)       # the latter are not read
    of_shared, asking = (*x.flat, *flat_weights(matrix)), request.for_hand_over(choice) if request else ()
    units = max(sizes) // BLOCK + (request is not None)
    card.launch(kernel, (units, choice.n_used + (shared is not None), n_rows), (32, shape.warps), *out.flat,
                *_of_experts(w, choice), *u.flat, w.n // 2, w.k, choice.n_used, *of_shared, sizes[-1], *asking,
                stream=stream)


def expert_down(card, decoder, x, w, inner, choice, shared, n_rows, *, request=None, stream=None):
    """x <- x plus the weighted sum of what the experts of each row give: the bits of expert_gemv(..., from_pairs=True)
    followed by `combine_reference`.

    x: float32 [n_rows, H]. w: Experts of [H, F]; H a multiple of 4. inner: Quantized [pairs, F]. shared: a
    SharedExpert, or its results, float32 [n_rows, H], or None. request: the HostRequest that has asked for the products
    of experts that are out of reach; without it, NaN takes their place. ValueError: more than 32 experts in a row."""
    if choice.n_used >= MAX_RANKS:
        raise ValueError(f"a row has up to {MAX_RANKS - 1} experts, not {choice.n_used}")
    has_matrix, n, k = isinstance(shared, SharedExpert), w.n, w.k
    bits = output_bits_of(card, n, n_rows)
    shape = shape_of(card, decoder, k, n)
    shared_shape = shape_of(card, shared.decoder, shared.w.k, n) if has_matrix else None
    warps = warps_of(card, bits, choice.n_used, shape, shared_shape)
    shape, shared_shape = shape._replace(warps=warps), shared_shape and shared_shape._replace(warps=warps)
    rows = x if has_matrix or shared is None else shared                                # not read
    kernel = down_kernel(decoder, shape, shared.decoder if has_matrix else None, shared_shape,
                         not has_matrix and shared is not None, request is not None)
    of_shared = (*flat_weights(shared.w), *shared.inner.flat, shared.w.k) if has_matrix else (
        *flat_weights(w.home), *inner.flat, k)                                             # not read
    card.launch(kernel, (-(-n // 2**bits), n_rows), (32, warps), x.reshape(-1), *_of_experts(w, choice),
                choice.weights.reshape(-1), *inner.flat, n, k, choice.n_used, bits, rows.reshape(-1), *of_shared,
                *(request.for_answer if request else ()), stream=stream)


def shape_of(card, decoder, k, n=1, in_pairs=False):
    """The Shape for n rows of k weights. in_pairs: for SwiGLU. On an emulated card there is no ring, since the CPU
    prefetches."""
    whole, narrow = k // BLOCK % TILE == 0, k == NARROW and n % 2 == 0 and not in_pairs
    if card.kind == "emulated":
        return Shape(4 if in_pairs else 2, 0, WARPS, whole, narrow)
    return Shape(2, 1, WARPS, whole, narrow)


def warps_of(card, output_bits, n_used, shape, shared_shape):
    """Warps of a block of threads of expert_down: as few as take no further round, DOWN_WARPS at most. On an emulated
    card the same for all models, so that they share a kernel."""
    if card.kind == "emulated":
        return WARPS
    items = (n_used << output_bits) // rows_of(shape)
    items += (1 << output_bits) // rows_of(shared_shape) if shared_shape else 0
    return -(-items // -(-items // DOWN_WARPS))


def output_bits_of(card, n, n_rows):
    """log2 of the numbers of a row in a block of threads of expert_down: as few as fit on the card at once."""
    bits = 3
    while 1 << bits < MAX_OUTPUTS and (n >> bits) * n_rows > BLOCKS * card.n_sms:
        bits += 1
    return bits


def _of_experts(w, choice):
    """The home of Experts, which gives the types of arrays, where its experts are, and which were chosen."""
    return *flat_weights(w.home), w.places.reshape(-1), choice.experts.reshape(-1)


# ---- check and time ----------------------------------------------------------------------------------------

class Sizes(NamedTuple):
    """Of a check: hidden, inner and shared sizes (multiples of the blocks of a file), experts, used ones, rows."""

    hidden: int
    inner: int
    shared: int
    n_experts: int
    n_used: int
    n_rows: int


# With blocks of 32 weights in the file; larger blocks make k larger.
CASES = [Sizes(64, 32, 32, 3, 1, 1), Sizes(1056, 128, 64, 9, 8, 2), Sizes(512, 512, 1056, 5, 2, 3)]


def random_matrix(card, format, n, k, rng):
    """A Matrix with random weights."""
    return Matrix(format.name, n, k, *on_card(card, format, random_raw(rng, format, n, k), n, k))


def random_experts(card, format, n_experts, n, k, rng, absent=()):
    """(Experts with random weights in permuted slots of a home with a slot too many, the Matrix of each). Those of
    `absent` are out of reach."""
    home = random_matrix(card, format, (n_experts + 1) * n, k, rng)
    experts = Experts(home, n, card.zeros((n_experts, 2), np.uint64))
    slots = rng.permutation(n_experts + 1)[:n_experts]
    places = [(0, 0) if e in absent else experts.addresses(slot) for e, slot in enumerate(slots)]
    card.copy_in(experts.places, np.array(places, np.uint64))
    return experts, [experts.slot(slot) for slot in slots]


def random_choice(card, rng, sizes):
    """A Choice of distinct experts, and its arrays."""
    experts = np.array([rng.permutation(sizes.n_experts)[:sizes.n_used] for _ in range(sizes.n_rows)], np.int32)
    weights = rng.random((sizes.n_rows, sizes.n_used + 1), np.float32)
    return Choice(card.upload(experts), card.upload(weights)), experts, weights


def check(card, format, sizes, shared_format=None, absent=()):
    """Compares the three products with `gemv` of each expert, swiglu_quantize and combine_reference, bit for bit.
    shared_format: of the shared expert; None: there is none. absent: experts out of reach. Returns 0, the error."""
    rng = np.random.default_rng(sizes)
    unit = math.lcm(format.file_block, (shared_format or format).file_block)
    hidden, inner, shared_size = (-(-size // unit) * unit for size in sizes[:3])
    choice, experts, weights = random_choice(card, rng, sizes)
    step = Step(card, quant_gemv.decoder(format), choice, sizes, experts.ravel().tolist(), absent)
    gate_up = random_experts(card, format, sizes.n_experts, 2 * inner, hidden, rng, absent)
    down = random_experts(card, format, sizes.n_experts, hidden, inner, rng, absent)
    shared = shared_down = None
    if shared_format:
        shared, shared_down = (
            SharedExpert(quant_gemv.decoder(shared_format), random_matrix(card, shared_format, n, k, rng),
                         _quantized(card, sizes.n_rows + 1, shared_size))
            for n, k in ((2 * shared_size, hidden), (hidden, shared_size)))
    _check_gate_up(step, gate_up, Quantized(*map(card.upload, random_activations(rng, sizes.n_rows, hidden))), shared)
    if shared:
        shared_down = shared_down._replace(inner=shared.inner)
    _check_down(step, down, Quantized(*map(card.upload, random_activations(rng, step.pairs, inner))), weights,
                shared_down, rng)
    return 0.0


class Step(NamedTuple):
    """What the parts of `check` share."""

    card: object
    decoder: Decoder
    choice: Choice
    sizes: Sizes
    chosen: list            # the expert of each pair
    absent: tuple

    @property
    def pairs(self):
        return len(self.chosen)

    def reached(self):
        """The pairs whose expert is within reach, with it."""
        return [(pair, expert) for pair, expert in enumerate(self.chosen) if expert not in self.absent]

    def products(self, matrices, x, per_x):
        """float32 [pairs, n]: what `gemv` gives of each expert, NaN where it is out of reach."""
        n = matrices[0].n
        y = _poisoned(self.card, (self.pairs, n))
        for pair, expert in self.reached():
            gemv(self.card, self.decoder, y[pair], n, matrices[expert], _row(x, pair // per_x), 1)
        return y


def _check_gate_up(step, experts, u, shared):
    """expert_gemv of rows, and expert_swiglu."""
    (w, matrices), card, n_rows = experts, step.card, step.sizes.n_rows
    n, stride = w.n, w.n + 3
    want, y = step.products(matrices, u, step.choice.n_used), _poisoned(card, (step.pairs + 1, stride))
    expert_gemv(card, step.decoder, y.reshape(-1)[1:], stride, w, u, step.choice, n_rows)
    got = card.download(y)
    np.testing.assert_array_equal(got[:-1, 1:n + 1], card.download(want))
    got[:-1, 1:n + 1] = np.nan
    assert np.isnan(got).all(), "wrote elsewhere"
    out, want_out = _quantized(card, step.pairs + 1, n // 2), _quantized(card, step.pairs + 1, n // 2)
    for pair, _ in step.reached():
        swiglu_quantize(card, _row(want_out, pair), want[pair], 1, n // 2)
    expert_swiglu(card, step.decoder, out, w, u, step.choice, n_rows, shared)
    _assert_equal(card, out, want_out)
    if shared:
        rows, want_inner = _poisoned(card, (n_rows, shared.w.n)), _quantized(card, n_rows + 1, shared.w.n // 2)
        gemv(card, shared.decoder, rows, shared.w.n, shared.w, u, n_rows)
        swiglu_quantize(card, want_inner, rows, n_rows, shared.w.n // 2)
        _assert_equal(card, shared.inner, want_inner)


def _check_down(step, experts, inner, weights, shared, rng):
    """expert_gemv of pairs, and expert_down with the shared expert's matrix and with its results."""
    (w, matrices), card, (n_rows, n_used) = experts, step.card, (step.sizes.n_rows, step.sizes.n_used)
    y, want = _poisoned(card, (step.pairs, w.n)), step.products(matrices, inner, 1)
    expert_gemv(card, step.decoder, y, w.n, w, inner, step.choice, n_rows, from_pairs=True)
    y = card.download(y)
    np.testing.assert_array_equal(y, card.download(want))
    elsewhere, before = (rng.standard_normal((rows, w.n), np.float32) for rows in (step.pairs, n_rows))
    shared_y = None
    if shared:
        shared_y = _poisoned(card, (n_rows, w.n))
        gemv(card, shared.decoder, shared_y, w.n, shared.w, shared.inner, n_rows)
    y = np.where(np.isnan(y), elsewhere, y).reshape(n_rows, n_used, w.n)
    want = combine_reference(before, y, weights, card.download(shared_y) if shared else None)
    request = _answered(card, elsewhere, n_rows, n_used) if step.absent else None
    for given in (shared, shared_y) if shared else (None,):
        x = card.upload(np.pad(before, ((0, 1), (0, 0)), constant_values=np.nan))
        expert_down(card, step.decoder, x, w, inner, step.choice, given, n_rows, request=request)
        got = card.download(x)
        np.testing.assert_array_equal(got[:-1], want)
        assert np.isnan(got[-1]).all(), "wrote past the end"
        assert not request or not card.download(request.state).any(), "blocks that have arrived are still counted"


def _answered(card, results, n_rows, n_used):
    """A HostRequest that was answered with `results` [pairs, k]."""
    products = _poisoned(card, (n_rows, n_used + 1, results.shape[1]))
    words, state = card.zeros(MAIL_WORDS, np.uint32), card.zeros(ARRIVED + n_rows, np.uint32)
    return HostRequest(words, None, None, card.upload(results), state, products, 0, 0, 0)


def _row(x, row):
    """One row of a Quantized."""
    return Quantized(x.q[row:row + 1], x.d[row:row + 1])


def _poisoned(card, shape):
    array = card.alloc(shape, np.float32)
    card.poison(array)
    return array


def _quantized(card, rows, k):
    """A Quantized of that size that nobody has written yet."""
    x = Quantized(card.alloc((rows, k), np.int8), card.alloc((rows, k // BLOCK), np.float32))
    card.poison(x.q), card.poison(x.d)
    return x


def _assert_equal(card, got, want):
    for a, b in zip(got, want):
        np.testing.assert_array_equal(card.download(a), card.download(b))


def cases(card):
    """The checks, then times of the two launches of a layer of Qwen3.6-35B-A3B."""
    for format in FORMATS.values():
        for sizes in CASES:
            yield Case("{} {} {} of {}, {} used, {} rows, ".format(*sizes) + format.name, partial(
                check, card, format, sizes, FORMATS["Q8_0"], (1,)))
    for format in FORMATS["Q8_0"], FORMATS["Q4_K"]:
        for n_rows in (1, 8):
            yield from _timed(card, format, Sizes(2048, 512, 512, 64, 8, n_rows))


def _timed(card, format, sizes):
    """Each call chooses the experts that follow those of the call before, so that no cache has them. With several rows,
    no two rows choose the same expert."""
    def zeros(n, k):
        return Matrix(format.name, n, k, *(card.zeros(*array) for array in format.arrays(n, k)))

    def experts(n, k):
        w = Experts(zeros(sizes.n_experts * n, k), n, card.zeros((sizes.n_experts, 2), np.uint64))
        card.copy_in(w.places, np.array([w.addresses(slot) for slot in range(sizes.n_experts)], np.uint64))
        return w

    hidden, inner, _, n_experts, n_used, n_rows = sizes
    decoder, pairs, used = quant_gemv.decoder(format), n_rows * n_used, n_rows * n_used + n_rows
    weights = card.zeros((n_rows, n_used + 1), np.float32)
    order = [np.arange(first, first + pairs).reshape(n_rows, n_used) % n_experts for first in range(0, n_experts, 8)]
    choices = itertools.cycle([Choice(card.upload(chosen.astype(np.int32)), weights) for chosen in order])
    gate_up, down, shared_gate_up, shared_down = (
        make(n, k) for make in (experts, zeros) for n, k in ((2 * inner, hidden), (hidden, inner)))
    u, out = _quantized(card, n_rows, hidden), _quantized(card, pairs, inner)
    x = card.zeros((n_rows, hidden), np.float32)
    shared = SharedExpert(decoder, shared_gate_up, _quantized(card, n_rows, inner))
    name, n_bytes = f", {n_rows} rows, {format.name}", (pairs + 1) * shared_down.values.nbytes
    n_bytes += (pairs + 1) * shared_down.scales.nbytes
    yield Case("gate and up" + name, launch=lambda: expert_swiglu(
        card, decoder, out, gate_up, u, next(choices), n_rows, shared), n_bytes=2 * n_bytes,
        n_ops=4 * used * inner * hidden, pipe="dp4a")
    shared = shared._replace(w=shared_down)
    yield Case("down" + name, launch=lambda: expert_down(
        card, decoder, x, down, out, next(choices), shared, n_rows), n_bytes=n_bytes, n_ops=2 * used * inner * hidden,
        pipe="dp4a")


if __name__ == "__main__":
    main("Experts in decode steps", cases)
