"""The router of a mixture of experts: which experts each row goes to, and the rows of each expert side by side.

**Choice.** A row has a logit l_e for each expert e, and a logit s for the gate of the shared expert. The n_used experts
of the largest logits are chosen, the likeliest first, of equal ones the lower number first. That is rank r = 0, 1, ...:

    w_r = exp(l_r - l_0) / sum over the chosen of exp(l_r - l_0), added in the order of rank
    w of the shared expert = sigmoid(s)

This is the softmax over all experts, divided by the part of it that was chosen: what is common to both cancels.
A NaN counts as the largest logit, so it is chosen, and all weights of its row become NaN.

    logits   float32, flat     row i begins at i * stride: n_experts logits, then s
    experts  int32 [rows, n_used]       weights  float32 [rows, n_used + 1]

A warp takes a row, and each lane experts that follow each other. The n_used largest logits are on the n_used lanes with
the largest maxima. So the logits of these lanes are spread over the warp, and again the lanes with the largest maxima
keep theirs, until a lane has a single one: 256, then 64, then 16 logits for 8 of 256 experts. Each time a lane counts
the larger maxima of the other 31, some 100 instructions. Pipe: integer; bound by latency.

**A decode step** gets its norm, its logits and its choice by one launch, `norm_route`. It gives the bits of the
separate launches: kernels/norm.py, kernels/float_matmul.py (the decode family) and `route`.

    x       float32 [rows, k]           router  float32 [n_experts + 1, k], s is the product of the last row
    out     int8 blocks of the norm     k a multiple of 32, up to 8,192

A warp has a row of the router, and every block computes the norm for itself. A lane loads its first 64 weights of the
router before it waits for x. The block that arrives last at a row of x chooses its experts. Further rows of x have
blocks of their own until the card is full. With more rows a block takes 2 or 4, and multiplies each weight by all of
them. Pipe: fp32; 4 bytes for each weight of the router, 2.1 MB for 257 x 2048. Bound by latency.

**Groups.** A pair is (row, rank), with the number row * n_used + rank. `group_pairs` sorts the pairs by expert, and
those of an expert by number. Then it cuts each expert's part into tiles of tile_rows positions, the last one shorter:

    sorted position    0   1   2   3   4   5   6   7          order[sorted position] = pair
    expert             0   0   0   2   2   3   3   3          position[pair] = sorted position
    tiles of 2        |-----| |-| |-----| |-----| |-|         (0, 0, 2) (0, 2, 1) (2, 3, 2) (3, 5, 2) (3, 7, 1)

One block of threads counts and places all pairs. A warp takes a stretch of them, 32 at a time, and counts each expert's
in a line of its own in shared memory. The line tells a pair how many of its expert come before it there. Running
sums over the warps, then over the experts, turn that into its position. All of this is counting, so nothing depends on
the order in which warps run. Pipe: integer, about 45 instructions for 32 pairs; bound by the loads and stores of one
SM, most of them scattered.

**A made-up choice** (`route_like`) replaces the experts in benchmarks, where random weights would choose evenly.
"""

from collections import namedtuple
from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint16, uint32

from kernels.bench import Case, main
from kernels.float_matmul import gemv_float
from kernels.intrinsics import (arrive, div_rn, exp, let_next_begin, sigmoid, uniform, wait_for_previous, warp_number,
                                warp_sum)
from kernels.norm import (MAX_WARPS, WEIGHTS, NormInput, hold_weights, norm_quantizer, rms_norm, rms_norm_quantize,
                          store_plain, store_quantized)
from kernels.operands import Matrix, Quantized
from kernels.quantize import word_max
from kernels.records import Choice, Groups, Places
from kernels.sample import key_value, order_key
from kernels.synthetic import bits_reference, random_bits

MOST_EXPERTS = 512
MOST_USED = 16            # so that `finder` keeps fewer keys each time
WARPS = 4                 # warps of a block that choose, each for a row
MOST_K = 8192             # values that a block of norm_route keeps of its rows of x in shared memory
MOST_ROWS = 4             # rows of x of such a block
ROUTER_BLOCKS = 3         # such blocks that an SM runs at once
DRIFT = 64                # positions after which a hot expert of a made-up choice gives way to another one
MOST_PAIRS = 1 << 17      # of a launch of group_pairs
MOST_GROUPED = (1 << 16) - 1        # rows of such a launch: an expert's pairs, one of each row, are counted in 16 bits
LEAST_GROUP_WARPS, MOST_GROUP_WARPS = 8, 32
N_COUNTS, N_STARTS = MOST_GROUP_WARPS * MOST_EXPERTS, MOST_EXPERTS + 1
AHEAD = 4                 # experts that a lane of group_pairs loads at once
EVERY_LANE = 0xFFFFFFFF

# How norm_route is spread. warps: of a block, each with a row of the router. held: weights of the router that a lane
# has loaded before x is there; later it loads `batch` at once. On an emulated card a norm for each few warps would cost
# more than the products, and registers are memory.
RouterShape = namedtuple("RouterShape", "warps held batch")
REAL, EMULATED = RouterShape(4, 64, 32), RouterShape(MAX_WARPS, 0, 4)


def route_reference(logits, n_experts, n_used):
    """logits float32 [rows, at least n_experts + 1] -> (experts int32 [rows, n_used], weights float64
    [rows, n_used + 1])."""
    of_experts, shared = logits[:, :n_experts], logits[:, n_experts].astype(np.float64)
    is_nan = np.isnan(of_experts)
    numbers = np.broadcast_to(np.arange(n_experts), of_experts.shape)
    experts = np.lexsort((numbers, -np.where(is_nan, 0, of_experts), ~is_nan), axis=-1)[:, :n_used]
    chosen = np.take_along_axis(of_experts, experts, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        e = np.exp((chosen - chosen[:, :1]).astype(np.float64))     # the difference is rounded to float32, as on cards
        weights = np.column_stack([e / e.sum(axis=1, keepdims=True), 1 / (1 + np.exp(-shared))])
    return experts.astype(np.int32), weights


def group_reference(experts, n_experts, tile_rows):
    """experts int32 [rows, n_used] -> what Groups has, in NumPy: order, position, tiles."""
    of_pairs = experts.ravel()
    order = np.argsort(of_pairs, kind="stable").astype(np.int32)
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    counts = np.bincount(of_pairs, minlength=n_experts)
    starts = np.cumsum(counts) - counts
    tiles = [(e, starts[e] + first, min(tile_rows, counts[e] - first))
             for e in range(n_experts) for first in range(0, counts[e], tile_rows)]
    return order, position, np.array(tiles, np.int32).reshape(-1, 3)


def hot_experts(n_experts, n_used):
    """How many experts of a layer are hot in `route_like`: an eighth, but as many as a row uses, and not all."""
    return max(min(max(n_used, n_experts // 8), n_experts - 1), 1)


def route_like_reference(slots, positions, n_experts, n_used, hits, seed):
    """The experts that `route_like` chooses, int32 [rows, n_used]."""
    def bits(i, seed):
        return int(bits_reference(i + 1, seed)[i])

    n_hot, experts = hot_experts(n_experts, n_used), []
    for slot, position in zip(slots.tolist(), positions.tolist()):
        of_row, offsets = bits(position, bits(slot, seed)), []
        start = (bits(0, seed) + position // DRIFT) % 2**32
        for r in range(n_used):
            place, is_hot = bits(2 * r, of_row), bits(2 * r + 1, of_row) >> 8 < round(hits * 2**24)
            offset = place % n_hot if is_hot else n_hot + place % (n_experts - n_hot)
            while offset in offsets:
                offset = (offset + 1) % n_experts
            offsets.append(offset)
        experts.append([(start + offset) % n_experts for offset in offsets])
    return np.array(experts, np.int32)


def most_tiles(n_rows, n_used, n_experts, tile_rows):
    """The most tiles that the pairs of n_rows rows can have, whatever experts are chosen. A row has an expert once."""
    pairs = n_rows * n_used
    with_rows = min(pairs, n_experts)       # the more experts have rows, the more tiles are not full
    return min(with_rows + (pairs - with_rows) // tile_rows, n_experts * -(-n_rows // tile_rows))


# ---- choice ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def warp_rank(key):
    """How many lanes of the warp come before this one, if the largest key is first, of equal ones the lowest lane."""
    before = uint32(cuda.popc(uint32(uint32(cuda.match_any_sync(EVERY_LANE, int32(key))) & uint32(cuda.lanemask_lt()))))
    for distance in range(1, 32):
        if uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(key), distance)) > key:
            before = uint32(before + uint32(1))
    return before


@cache
def finder(n_used, each):
    """Device function (keys, numbers, kept, at, lane) -> (key, number, rank): the n_used largest of a warp's keys are
    on the lanes whose rank is below n_used. keys, numbers: local uint32 [each], the numbers increase from lane to lane.
    kept: shared uint32, of which 2 * n_used * each from `at` on are this warp's."""
    n_kept, fewer = n_used * each, -(-n_used * each // 32)

    @cuda.jit(device=True, forceinline=True)
    def rank(keys, numbers, kept, at, lane):
        return keys[0], numbers[0], warp_rank(keys[0])

    if each == 1:
        return rank
    find = finder(n_used, fewer)

    @cuda.jit(device=True, forceinline=True)
    def narrow(keys, numbers, kept, at, lane):
        """The lanes with the n_used largest maxima have all keys that count. These are spread over all lanes."""
        few_keys, few_numbers = cuda.local.array(fewer, uint32), cuda.local.array(fewer, uint32)
        largest = keys[0]
        for j in range(1, each):
            largest = word_max(largest, keys[j])
        counts = warp_rank(largest) < uint32(n_used)
        lanes = uint32(cuda.ballot_sync(EVERY_LANE, counts))
        to = uint32(at + uint32(cuda.popc(uint32(lanes & uint32(cuda.lanemask_lt())))) * uint32(each))
        if counts:
            for j in range(each):
                kept[uint32(to + uint32(j))] = keys[j]
                kept[uint32(to + uint32(n_kept + j))] = numbers[j]
        cuda.syncwarp()
        for j in range(fewer):
            i = uint32(lane * uint32(fewer) + uint32(j))
            few_keys[j] = kept[uint32(at + i)] if i < uint32(n_kept) else uint32(0)
            few_numbers[j] = kept[uint32(at + uint32(n_kept) + i)] if i < uint32(n_kept) else uint32(0)
        cuda.syncwarp()
        return find(few_keys, few_numbers, kept, at, lane)

    return narrow


@cache
def chooser(per_lane, n_used):
    """Device function that chooses the n_used experts of a row, of up to 32 * per_lane."""
    find, room = finder(n_used, per_lane), room_of(per_lane, n_used)

    @cuda.jit(device=True, forceinline=True)
    def choose(experts, weights, logits, start, row, n_experts, kept, lane, warp):
        """All lanes of a warp call. The logits of the row begin at `start`. kept: shared uint32, room_of(per_lane,
        n_used) for each warp."""
        keys, numbers = cuda.local.array(per_lane, uint32), cuda.local.array(per_lane, uint32)
        at = uint32(warp * uint32(room))
        for j in range(per_lane):
            number = uint32(lane * uint32(per_lane) + uint32(j))
            keys[j] = order_key(logits[uint32(start + number)]) if number < n_experts else uint32(0)
            numbers[j] = number
        shared = logits[uint32(start + n_experts)]
        key, number, rank = find(keys, numbers, kept, at, lane)
        if rank < uint32(n_used):
            experts[uint32(row * uint32(n_used) + rank)] = int32(number)
            kept[uint32(at + rank)] = key
        cuda.syncwarp()
        l = key_value(kept[uint32(at + min(lane, uint32(n_used - 1)))])
        cuda.syncwarp()
        e = exp(l - cuda.shfl_sync(EVERY_LANE, l, 0))
        total = float32(0)
        for r in range(n_used):
            total = total + cuda.shfl_sync(EVERY_LANE, e, r)
        weight = sigmoid(shared) if lane == uint32(n_used) else div_rn(e, total)
        if lane <= uint32(n_used):
            weights[uint32(row * uint32(n_used + 1) + lane)] = weight

    return choose


def room_of(per_lane, n_used):
    """uint32 in shared memory that a warp chooses with."""
    return 2 * n_used * per_lane


@cache
def route_kernel(per_lane, n_used):
    """The kernel of `route` for n_used of up to 32 * per_lane experts."""
    choose, room = chooser(per_lane, n_used), WARPS * room_of(per_lane, n_used)

    @cuda.jit
    def route_kernel(experts, weights, logits, stride, n_rows, n_experts):
        kept = cuda.shared.array(room, uint32)
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        row = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + warp)
        if row < n_rows:
            choose(experts, weights, logits, uint32(row * stride), row, n_experts, kept, lane, warp)

    return route_kernel


# ---- norm, router and choice of a decode step in one launch -------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def store_both(out, d, at, inside, y0, y1, y2, y3):
    """Has the parameters of `store_quantized` (kernels/norm.py). Stores floats in shared memory, where the row begins
    at `to`, and some of the int8 blocks: the blocks of threads take turns, each has a group of 128 values."""
    normed, to, q, start, block, blocks = out
    i = uint32(at - start)
    store_plain(normed, d, uint32(to + i), inside, y0, y1, y2, y3)
    if uint32(i >> uint32(7)) % blocks == block:
        store_quantized(q, d, at, inside, y0, y1, y2, y3)


quantize_norm = norm_quantizer(store_both)


@cache
def router_product(k, rows, shape):
    """Device functions (start, multiply) for a warp's row of the router, which begins at `line`, times `rows` rows of k
    values in shared memory. `start` loads the lane's first weights into `held`."""
    steps, n_held, batch = k // 32, min(k // 32, shape.held), shape.batch
    whole = n_held + (steps - n_held) // batch * batch

    @cuda.jit(device=True, forceinline=True)
    def start(held, router, line, lane):
        for s in range(n_held):
            held[s] = router[uint32(line + uint32(32 * s) + lane)]

    @cuda.jit(device=True, forceinline=True)
    def add(acc, weight, normed, step, lane):
        for c in range(rows):
            acc[c] = cuda.fma(weight, normed[uint32(uint32(c * k) + uint32(step << uint32(5)) + lane)], acc[c])

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, held, router, line, normed, lane):
        """acc[c] <- the lane's share of the product with row c, in the order of `gemv_float`."""
        more = cuda.local.array(batch, float32)
        for c in range(rows):
            acc[c] = float32(0)
        for s in range(n_held):
            add(acc, held[s], normed, uint32(s), lane)
        for s in range(uint32(n_held), uint32(whole), uint32(batch)):
            for i in range(batch):
                more[i] = router[uint32(line + uint32(uint32(s + uint32(i)) << uint32(5)) + lane)]
            for i in range(batch):
                add(acc, more[i], normed, uint32(s + uint32(i)), lane)
        for s in range(uint32(whole), uint32(steps)):
            add(acc, router[uint32(line + uint32(s << uint32(5)) + lane)], normed, uint32(s), lane)

    return start, multiply


@cache
def norm_route_kernel(k, per_lane, n_used, rows, shape):
    """The kernel of `norm_route` for `rows` rows of k values in a block, and n_used of up to 32 * per_lane experts."""
    choose, room = chooser(per_lane, n_used), WARPS * room_of(per_lane, n_used)
    start_product, multiply = router_product(k, rows, shape)
    room_held, room_normed, room_partial = max(min(k // 32, shape.held), 1), rows * k, (rows, MAX_WARPS)

    @cuda.jit(launch_bounds=32 * shape.warps)
    def norm_route_kernel(experts, weights, logits, arrived, q, d, router, x, norm_w, n, n_rows, eps):
        """Grid (blocks that share the n rows of the router, groups of `rows` rows of x)."""
        let_next_begin()
        thread = uint32(cuda.threadIdx.x)
        lane, warp, warps = uint32(thread & uint32(31)), uniform(thread >> uint32(5)), uint32(cuda.blockDim.x >> 5)
        block, blocks, group = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x), uint32(cuda.blockIdx.y)
        normed = cuda.shared.array(room_normed, float32, alignment=16)
        partial, is_last = cuda.shared.array(room_partial, float32), cuda.shared.array(1, uint32)
        kept = cuda.shared.array(room, uint32)
        norm_held, held = cuda.local.array(WEIGHTS, float32), cuda.local.array(room_held, float32)
        acc = cuda.local.array(rows, float32)
        number = uint32(block * warps + warp)           # of the warp's row of the router; beyond the last one, the last
        line = uint32(min(number, uint32(n - uint32(1))) * uint32(k))
        hold_weights(norm_held, norm_w, uint32(k), lane, warp, warps)
        start_product(held, router, line, lane)
        wait_for_previous()

        first = uint32(group * uint32(rows))
        here = min(uint32(rows), uint32(n_rows - first))
        for c in range(here):
            start = uint32(uint32(first + uint32(c)) * uint32(k))
            out = normed, uint32(uint32(c) * uint32(k)), q, start, block, blocks
            quantize_norm(out, d, x, start, norm_w, norm_held, uint32(k), eps, partial[c], lane, warp, warps)
        cuda.syncthreads()
        multiply(acc, held, router, line, normed, lane)
        for c in range(rows):
            total = warp_sum(acc[c])
            if lane == uint32(0) and number < n and uint32(c) < here:
                logits[uint32(uint32(first + uint32(c)) * n + number)] = total
        cuda.syncthreads()
        if thread == uint32(0):
            is_last[uint32(0)] = uint32(arrive(arrived, group) == uint32(blocks - uint32(1)))
        cuda.syncthreads()
        if is_last[uint32(0)] == uint32(0):
            return
        if thread == uint32(0):
            arrived[group] = uint32(0)
        choosing = min(warps, uint32(WARPS))
        if warp < choosing:
            for i in range(uint32(uint32(here + choosing - uint32(1)) // choosing)):
                c = uint32(uint32(i) * choosing + warp)
                if c < here:
                    row = uint32(first + c)
                    choose(experts, weights, logits, uint32(row * n), row, uint32(n - uint32(1)), kept, lane, warp)

    return norm_route_kernel


# ---- a made-up choice --------------------------------------------------------------------------------------

@cuda.jit
def route_like_kernel(experts, slots, positions, n_rows, n_experts, n_used, n_hot, threshold, seed):
    """A warp for each row; lane r keeps the offset of rank r."""
    let_next_begin()
    wait_for_previous()
    lane = uint32(cuda.threadIdx.x)
    row = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + warp_number())
    if row < n_rows:
        position = uint32(positions[row])
        of_row = random_bits(position, random_bits(uint32(slots[row]), seed))
        start = uint32(random_bits(uint32(0), seed) + uint32(position // uint32(DRIFT)))
        mine = uint32(n_experts)
        for r in range(n_used):
            place = random_bits(uint32(uint32(2) * uint32(r)), of_row)
            is_hot = uint32(random_bits(uint32(uint32(2) * uint32(r) + uint32(1)), of_row) >> uint32(8)) < threshold
            offset = uint32(place % n_hot) if is_hot else uint32(n_hot + place % uint32(n_experts - n_hot))
            while cuda.any_sync(EVERY_LANE, mine == offset):
                offset = uint32(uint32(offset + uint32(1)) % n_experts)
            mine = offset if lane == uint32(r) else mine
        if lane < n_used:
            experts[uint32(row * n_used + lane)] = int32(uint32(uint32(start % n_experts) + mine) % n_experts)


# ---- groups ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def sums_before(x, lane):
    """(the sum of the uint32 x of all lanes before this one, the sum of all lanes)."""
    own = x
    for offset in (1, 2, 4, 8, 16):
        other = uint32(cuda.shfl_up_sync(EVERY_LANE, int32(x), offset))
        x = uint32(x + (other if lane >= uint32(offset) else uint32(0)))
    return uint32(x - own), uint32(cuda.shfl_sync(EVERY_LANE, int32(x), 31))


@cuda.jit(device=True, forceinline=True)
def count_pairs(counts, position, experts, first, n_pairs, steps, line, lane):
    """Counts the experts of a warp's stretch of pairs, from `first` on, in counts[line + expert]. position[pair] <- how
    many pairs of the same expert stand before it in the stretch."""
    mine = cuda.local.array(AHEAD, uint32)
    for step in range(steps):
        start = uint32(first + uint32(step) * uint32(32 * AHEAD) + lane)
        for j in range(AHEAD):
            pair = uint32(start + uint32(32 * j))
            mine[j] = uint32(experts[pair]) if pair < n_pairs else uint32(MOST_EXPERTS)
        for j in range(AHEAD):
            pair, at = uint32(start + uint32(32 * j)), uint32(line + mine[j])
            same = uint32(cuda.match_any_sync(EVERY_LANE, int32(mine[j])))
            before = uint32(cuda.popc(uint32(same & uint32(cuda.lanemask_lt()))))
            rank = before
            if pair < n_pairs:
                rank = uint32(rank + uint32(counts[at]))
            cuda.syncwarp()
            if pair < n_pairs:
                position[pair] = int32(rank)
                if before == uint32(0):
                    counts[at] = uint16(rank + uint32(cuda.popc(same)))
            cuda.syncwarp()


@cuda.jit(device=True, forceinline=True)
def start_experts(starts, first_tiles, n_tiles, n_experts, tile_rows, lane):
    """starts[e]: how many pairs expert e has -> the sorted position of its first one. first_tiles[e] <- the number of
    its first tile. One element more of both ends the last expert. For one warp."""
    each = uint32(uint32(n_experts + uint32(31)) >> uint32(5))
    pairs, tiles, first = uint32(0), uint32(0), uint32(lane * each)
    for i in range(each):
        e = uint32(first + uint32(i))
        if e < n_experts:
            pairs = uint32(pairs + starts[e])
            tiles = uint32(tiles + uint32(starts[e] + tile_rows - uint32(1)) // tile_rows)
    (pairs, all_pairs), (tiles, all_tiles) = sums_before(pairs, lane), sums_before(tiles, lane)
    for i in range(each):
        e = uint32(first + uint32(i))
        if e < n_experts:
            count = starts[e]
            starts[e], first_tiles[e] = pairs, tiles
            pairs = uint32(pairs + count)
            tiles = uint32(tiles + uint32(count + tile_rows - uint32(1)) // tile_rows)
    if lane == uint32(0):
        starts[n_experts], first_tiles[n_experts] = all_pairs, all_tiles
        n_tiles[uint32(0)] = int32(all_tiles)


@cuda.jit
def group_kernel(order, position, tiles, n_tiles, experts, n_pairs, n_experts, tile_rows):
    """One block."""
    let_next_begin()
    counts = cuda.shared.array(N_COUNTS, uint16)        # a line of n_experts for each warp
    starts, first_tiles = cuda.shared.array(N_STARTS, uint32), cuda.shared.array(N_STARTS, uint32)
    thread, threads = uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    lane, warp, warps = uint32(thread & uint32(31)), uniform(thread >> uint32(5)), uint32(threads >> uint32(5))
    line = uint32(warp * n_experts)
    for i in range(uint32(uint32(warps * n_experts + threads - uint32(1)) // threads)):
        at = uint32(uint32(i) * threads + thread)
        if at < uint32(warps * n_experts):
            counts[at] = uint16(0)
    wait_for_previous()
    cuda.syncthreads()
    steps = uint32(uint32(n_pairs + uint32(threads * uint32(AHEAD)) - uint32(1)) // uint32(threads * uint32(AHEAD)))
    first = uint32(warp * steps * uint32(32 * AHEAD))
    count_pairs(counts, position, experts, first, n_pairs, steps, line, lane)
    cuda.syncthreads()
    of_threads = uint32(uint32(n_experts + threads - uint32(1)) // threads)
    for i in range(of_threads):
        e = uint32(uint32(i) * threads + thread)
        if e < n_experts:
            total = uint32(0)
            for w in range(warps):
                at = uint32(uint32(w) * n_experts + e)
                count = uint32(counts[at])
                counts[at] = uint16(total)
                total = uint32(total + count)
            starts[e] = total
    cuda.syncthreads()
    if warp == uint32(0):
        start_experts(starts, first_tiles, n_tiles, n_experts, tile_rows, lane)
    cuda.syncthreads()
    for step in range(uint32(steps * uint32(AHEAD))):
        pair = uint32(first + uint32(step) * uint32(32) + lane)
        if pair < n_pairs:
            e = uint32(experts[pair])
            to = uint32(uint32(position[pair]) + uint32(counts[uint32(line + e)]) + starts[e])
            position[pair], order[to] = int32(to), int32(pair)
    for i in range(of_threads):
        e = uint32(uint32(i) * threads + thread)
        if e < n_experts:
            start, end, tile = starts[e], starts[uint32(e + uint32(1))], first_tiles[e]
            while start < end:
                at, left = uint32(tile * uint32(3)), uint32(end - start)
                tiles[at], tiles[uint32(at + uint32(1))] = int32(e), int32(start)
                tiles[uint32(at + uint32(2))] = int32(min(left, tile_rows))
                start, tile = uint32(start + tile_rows), uint32(tile + uint32(1))


# ---- launches: they write in place and never allocate -----------------------------------------------------

def check_sizes(n_experts, n_used):
    """ValueError: the kernels cannot choose so many experts of so many."""
    if not 1 <= n_used <= min(n_experts, MOST_USED) or n_experts > MOST_EXPERTS:
        raise ValueError(f"a router chooses up to {MOST_USED} of up to {MOST_EXPERTS} experts, "
                         f"not {n_used} of {n_experts}")


def lane_experts(n_experts):
    """Experts of a lane: the least power of two that is enough, since each number is a kernel of its own."""
    return 1 << (-(-n_experts // 32) - 1).bit_length()


def route(card, choice, logits, stride, n_rows, n_experts, *, stream=None):
    """choice, a Choice of n_rows rows or more <- the experts and weights of n_rows rows of logits. logits: float32, row
    i begins at element i * stride; n_experts logits and that of the shared expert's gate."""
    check_sizes(n_experts, choice.n_used)
    kernel = route_kernel(lane_experts(n_experts), choice.n_used)
    card.launch(kernel, -(-n_rows // WARPS), (32, WARPS), choice.experts.reshape(-1), choice.weights.reshape(-1),
                logits.reshape(-1), stride, n_rows, n_experts, stream=stream)


def norm_route_scratch(n_rows, n_experts):
    """Shapes of (logits float32, arrived uint32) for `norm_route`; arrived must be zero before the first launch."""
    return (n_rows, n_experts + 1), n_rows


def norm_route(card, choice, out, x, router, scratch, n_rows, *, stream=None):
    """For decode steps: choice, a Choice <- the experts and weights of n_rows rows of x, a NormInput; out, Quantized
    [n_rows, k] <- their quantised RMSNorm. router: Matrix float32 [n_experts + 1, k], whose last row is the gate of the
    shared expert; k a multiple of 32 up to 8,192. scratch: (logits, arrived), see `norm_route_scratch`.

    The bits are those of `rms_norm_quantize`, and of `rms_norm`, `gemv_float` and `route` in turn."""
    n_experts, k = router.n - 1, router.k
    check_sizes(n_experts, choice.n_used)
    if k % 32 or k > MOST_K:
        raise ValueError(f"a router in decode steps takes rows of a multiple of 32 up to {MOST_K} values, not {k}")
    shape = EMULATED if card.kind == "emulated" else REAL
    warps = min(router.n, shape.warps)
    blocks = -(-router.n // warps)
    wanted = n_rows if card.kind == "emulated" else -(-n_rows * blocks // (ROUTER_BLOCKS * card.n_sms))
    rows = min(1 << (wanted - 1).bit_length(), MOST_ROWS, 1 << (MOST_K // k).bit_length() - 1)
    kernel = norm_route_kernel(k, lane_experts(n_experts), choice.n_used, rows, shape)
    card.launch(kernel, (blocks, -(-n_rows // rows)), 32 * warps, choice.experts.reshape(-1),
                choice.weights.reshape(-1), *(array.reshape(-1) for array in (*scratch, *out, router.values, x.values)),
                x.weight, router.n, n_rows, float(x.eps), stream=stream)


def route_like(card, choice, places, n_rows, n_experts, hits, seed, *, stream=None):
    """For benchmarks: replaces the experts of a Choice by made-up ones; the weights stay. An expert is one of the hot
    ones of the layer (see `hot_experts`) with probability `hits`, 0 to 1, else one of the others. Every DRIFT positions
    a hot expert gives way to another. A row has an expert once: if it is drawn again, the next one takes its place.

    places: Places of the rows; seed: uint32, of the layer. Equal places and seeds give equal experts."""
    n_used = choice.n_used
    check_sizes(n_experts, n_used)
    if n_experts < 2:
        raise ValueError("a layer with one expert has no choice to make up")
    card.launch(route_like_kernel, -(-n_rows // WARPS), (32, WARPS), choice.experts.reshape(-1), *places, n_rows,
                n_experts, n_used, hot_experts(n_experts, n_used), round(hits * 2**24), seed, stream=stream)


def group_pairs(card, groups, choice, n_rows, n_experts, tile_rows, *, stream=None):
    """groups, Groups <- the pairs of the first n_rows rows of a Choice, in tiles of up to tile_rows positions."""
    n_pairs = n_rows * choice.n_used
    check_sizes(n_experts, choice.n_used)
    if n_pairs > MOST_PAIRS or n_rows > MOST_GROUPED:
        raise ValueError(f"up to {MOST_PAIRS} pairs of up to {MOST_GROUPED} rows are sorted, not {n_pairs} of {n_rows}")
    warps = min(max(-(-n_pairs // (32 * AHEAD)), LEAST_GROUP_WARPS), MOST_GROUP_WARPS)
    card.launch(group_kernel, 1, 32 * warps, groups.order, groups.position, groups.tiles.reshape(-1), groups.n_tiles,
                choice.experts.reshape(-1), n_pairs, n_experts, tile_rows, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

# rows, experts, used
CASES = [(1, 8, 2), (3, 8, 8), (5, 256, 8), (9, 512, 10), (6, 60, 4), (2, 100, 16), (1, 1, 1), (4, 130, 16)]
# rows, experts, used, length of a row
NORM_CASES = [(1, 8, 2, 256), (3, 256, 8, 2048), (9, 60, 4, 1056), (2, 512, 10, 4096), (5, 130, 3, 32), (1, 1, 1, 8192)]
# rows, experts, used, hits
LIKE_CASES = [(1, 8, 2, 0.5), (50, 256, 8, 0.9), (7, 512, 10, 0.0), (9, 60, 4, 1.0), (5, 16, 16, 0.7), (3, 2, 1, 0.2)]
# rows, experts, used, rows of a tile
GROUP_CASES = [(1, 8, 2, 16), (1, 256, 8, 64), (50, 8, 2, 64), (33, 256, 8, 16), (297, 256, 8, 16), (70, 60, 4, 1),
               (600, 512, 16, 64), (4096, 256, 8, 64), (8192, 512, 16, 128), (3, 1, 1, 2)]


def awkward_logits(rng, rows, width):
    """float32 [rows, width]: among random rows one with many ties, and, if there are enough, rows with NaN, with
    infinities, and with no finite logit."""
    logits = rng.standard_normal((rows, width), np.float32) * 3
    logits[rows // 2] = rng.integers(-2, 2, width)
    if rows > 3:
        logits[0, rng.integers(width, size=2)] = np.nan
        logits[1, rng.integers(width, size=2)] = np.inf, -np.inf
        logits[-1] = -np.inf
    return logits


def check(card, n_rows, n_experts, n_used):
    """Routes random rows. Returns the largest relative error of a weight."""
    rng = np.random.default_rng((n_rows, n_experts, n_used))
    logits = awkward_logits(rng, n_rows, n_experts + 1)
    given = card.upload(np.pad(logits, ((0, 0), (0, 3)), constant_values=np.inf))      # to show what is read beyond
    choice = Choice(card.alloc((n_rows + 1, n_used), np.int32), card.alloc((n_rows + 1, n_used + 1), np.float32))
    for array in choice:
        card.poison(array)
    route(card, choice, given, n_experts + 4, n_rows, n_experts)
    experts, weights = map(card.download, choice)
    want_experts, want = route_reference(logits, n_experts, n_used)
    np.testing.assert_array_equal(experts[:n_rows], want_experts)
    # exp within 1.1 ulp, a rounding for each rank of the sum, a division; sigmoid within 2.5 ulp; an ulp is 2**-23
    np.testing.assert_allclose(weights[:n_rows], want, rtol=(n_used / 2 + 3) * 2.0 ** -23, atol=2.0 ** -148)
    assert (experts[n_rows] == -1).all() and np.isnan(weights[n_rows]).all(), "wrote past the end"
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(abs(weights[:n_rows] - want) / want, posinf=0).max()


def check_norm_route(card, n_rows, n_experts, n_used, k):
    """Two replays of one recording, of other rows each, against the separate launches: the same bits. Returns 0, the
    error."""
    rng = np.random.default_rng((n_rows, n_experts, k))
    router = Matrix("F32", n_experts + 1, k, card.upload(rng.standard_normal((n_experts + 1, k), np.float32)))
    norm_w = card.upload(rng.uniform(0.5, 1.5, k).astype(np.float32))
    (shape, n_arrived), arrays = norm_route_scratch(n_rows, n_experts), []
    for _ in range(2):
        choice = Choice(card.alloc((n_rows + 1, n_used), np.int32), card.alloc((n_rows + 1, n_used + 1), np.float32))
        out = Quantized(card.alloc((n_rows + 1, k), np.int8), card.alloc((n_rows + 1, k // 32), np.float32))
        logits = card.alloc((shape[0] + 1, shape[1]), np.float32)
        for array in (*choice, *out, logits):
            card.poison(array)
        arrays.append((choice, out, logits))
    y, arrived = card.alloc((n_rows, k), np.float32), card.zeros(n_arrived, np.uint32)
    x = NormInput(card.alloc((n_rows, k), np.float32), norm_w, 1e-6)
    (choice, out, logits), wanted = arrays
    with card.record() as recording:
        norm_route(card, choice, out, x, router, (logits, arrived), n_rows)
    for scale in (1, 1e-3):
        rows = rng.standard_normal((n_rows, k), np.float32) * np.float32(scale)
        if n_rows > 2:
            rows[1, k // 3] = np.nan
        card.copy_in(x.values, rows)
        recording.replay()
        choice, out, logits = wanted
        rms_norm_quantize(card, out, x, n_rows, k)
        rms_norm(card, y, x, n_rows, k)
        gemv_float(card, logits, n_experts + 1, router, y, n_rows)
        route(card, choice, logits, n_experts + 1, n_rows, n_experts)
        for got, want in zip(*((*choice, *out, logits) for choice, out, logits in arrays), strict=True):
            np.testing.assert_array_equal(card.download(got), card.download(want))
        assert not card.download(arrived).any(), "counters must be zero again"
    return 0.0


def check_like(card, n_rows, n_experts, n_used, hits, seed=3):
    """Makes up choices of three slots. Returns 0, the error."""
    slots, positions = np.arange(n_rows, dtype=np.int32) % 3, np.arange(n_rows, dtype=np.int32) // 3 * 29
    choice = Choice(card.alloc((n_rows + 1, n_used), np.int32), None)
    card.poison(choice.experts)
    route_like(card, choice, Places(card.upload(slots), card.upload(positions)), n_rows, n_experts, hits, seed)
    experts = card.download(choice.experts)
    np.testing.assert_array_equal(experts[:n_rows],
                                  route_like_reference(slots, positions, n_experts, n_used, hits, seed))
    assert all(len(set(row)) == n_used for row in experts[:n_rows]) and (experts[n_rows] == -1).all()
    return 0.0


def check_groups(card, n_rows, n_experts, n_used, tile_rows):
    """Sorts pairs whose experts are even, then all in the first experts. Returns 0, the error."""
    rng = np.random.default_rng((n_rows, n_experts, n_used))
    even = rng.random((n_rows, n_experts)).argsort(axis=1)[:, :n_used].astype(np.int32)
    first = np.tile(np.arange(n_used, dtype=np.int32), (n_rows, 1))
    n_pairs, room = n_rows * n_used, most_tiles(n_rows, n_used, n_experts, tile_rows)
    for experts in (even, first):
        groups = Groups(*(card.alloc(shape, np.int32) for shape in (n_pairs + 1, n_pairs + 1, (room + 1, 3), 2)))
        for array in groups:
            card.poison(array)
        choice = Choice(card.upload(experts), None)
        group_pairs(card, groups, choice, n_rows, n_experts, tile_rows)
        got, want = list(map(card.download, groups)), group_reference(experts, n_experts, tile_rows)
        assert got[3].tolist() == [len(want[2]), -1] and len(want[2]) <= room
        for have, wanted in zip(got, want):
            np.testing.assert_array_equal(have[:len(wanted)], wanted)
            assert (have[len(wanted):] == -1).all(), "wrote past the end"
    return 0.0


def cases(card):
    """The checks, then times of a decode step and of prompts of a 35B-A3B."""
    for case in CASES:
        yield Case("{} rows, {} experts, {} used".format(*case), partial(check, card, *case))
    for case in NORM_CASES:
        yield Case("{} rows, {} experts, {} used, after the norm of {}".format(*case),
                   partial(check_norm_route, card, *case))
    for case in LIKE_CASES:
        yield Case("{} rows, {} experts, {} used, made up, hits {}".format(*case), partial(check_like, card, *case))
    for case in GROUP_CASES:
        yield Case("{} rows, {} experts, {} used, by {}".format(*case), partial(check_groups, card, *case))
    rng = np.random.default_rng(0)
    for rows in (1, 8, 297, 4096):
        logits = card.upload(rng.standard_normal((rows, 257), np.float32))
        choice = Choice(card.alloc((rows, 8), np.int32), card.alloc((rows, 9), np.float32))
        yield Case(f"choice, {rows} rows", launch=partial(route, card, choice, logits, 257, rows, 256),
                   n_bytes=logits.nbytes)
        if rows <= 8:
            router = Matrix("F32", 257, 2048, card.zeros((257, 2048), np.float32))
            x = NormInput(card.zeros((rows, 2048), np.float32), card.zeros(2048, np.float32), 1e-6)
            out = Quantized(card.alloc((rows, 2048), np.int8), card.alloc((rows, 64), np.float32))
            shape, n_arrived = norm_route_scratch(rows, 256)
            scratch = card.alloc(shape, np.float32), card.zeros(n_arrived, np.uint32)
            yield Case(f"norm, router and choice, {rows} rows", n_bytes=router.values.nbytes,
                       launch=partial(norm_route, card, choice, out, x, router, scratch, rows))
        room = most_tiles(rows, 8, 256, 64)
        groups = Groups(*(card.alloc(shape, np.int32) for shape in (8 * rows, 8 * rows, (room, 3), 1)))
        yield Case(f"groups, {rows} rows", launch=partial(group_pairs, card, groups, choice, rows, 256, 64),
                   n_bytes=3 * groups.order.nbytes)


if __name__ == "__main__":
    main("The router of experts", cases)
