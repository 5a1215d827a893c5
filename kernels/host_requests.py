"""How a decode step asks the host for products of experts that the card lacks, and takes the answer: the card's side.

kernels/host_experts.py has the host's side, and tells what both exchange. Here are parts of the two launches that a
layer's experts take anyway (kernels/expert_gemv.py), so asking takes no launch of its own:

    expert_swiglu   one block of threads more. It lists the pairs whose expert is out of reach, copies the rows that
                    these need into memory that the host reaches, and raises a request. The other blocks do not wait
                    for it. If nothing is missing, it ends at once
    expert_down     computes with the experts that the card has. A block whose row lacks an expert keeps its products
                    in the card's memory, and ends. The block that arrives last at the row waits for the answer, and
                    adds up the row in the order of rank

So the one block of a row that waits has nobody behind it: it waits for the host alone, and all other blocks of its row
have ended. No order in which a card runs blocks can make it wait for ever, and the rest of the card is free for other
streams meanwhile, as for a prompt. Rows that lack nothing are added up where their products are, without a wait.

    state      uint32 [2 + rows]                number of the last request; whether one failed; how many blocks have
                                                arrived at each row, 0 between two launches
    products   float32 [rows, n_used + 1, k]    of rows that lack an expert; last, those of the shared expert

Failures. If no answer comes in time, or the service says that none will come, the row becomes NaN, and the card writes
1 + the number of the layer to TROUBLE. From then on `hand_over` asks for nothing, and puts NaN into the weights of all
rows, so that no wrong number can pass for a right one.

Bound by latency: a request takes two loads that depend on each other, a copy of a row and a write over the link; an
answer takes a look over the link, a read of the results over the link, and one of the products from the second-level
cache.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.card import Array
from kernels.emulated.serving import FAILED, WORD
from kernels.intrinsics import (arrive, let_next_begin, load_floats4, load_words4, load_words4_anew,
                                load_words4_past_l1, nanoseconds, poll, publish, store_floats4, store_words4,
                                wait_for_previous, word_as_float)
from kernels.operands import Quantized

THREADS = 256                                           # of `hand_over_kernel`
POLL_PAUSE = 500                                        # nanoseconds between two looks at an answer, for each row
AHEAD = 4                                               # ranks whose products a thread loads at once
REQUEST, LAYER, SIZE, PRODUCTS, TROUBLE, ANSWER = (
    WORD[name] for name in ("request", "layer", "size", "products", "trouble", "answer"))
ASKED, GAVE_UP, ARRIVED = range(3)                      # places in `state`; the last one is that of the first row
NAN = float("nan")


class HostRequest(NamedTuple):
    """What the launches of a layer take to ask the host. The arrays are the card's; see the tops of this file and of
    kernels/host_experts.py. A step uses the first rows of `products` and `state`."""

    words: Array                # uint32 [MAIL_WORDS]
    wanted: Array               # int32 [3, n]
    rows: Quantized             # [rows, k]
    results: Array              # float32 [pairs, k]
    state: Array                # uint32 [2 + rows]
    products: Array             # float32 [rows, n_used + 1, k]
    layer: int
    n_experts: int
    milliseconds: int           # after which a row waits no longer

    def for_hand_over(self, choice):
        """The arguments of the function of `hand_over_of`, from `weights` to `n_experts`."""
        return (choice.weights.reshape(-1), self.words, self.wanted.reshape(-1), self.wanted.shape[1], *self.rows.flat,
                self.state, self.layer, self.n_experts)

    @property
    def for_answer(self):
        """The arguments of `finish_row`, from `products` to `milliseconds`."""
        return (self.products.reshape(-1), self.results.reshape(-1), self.words, self.state, self.layer,
                self.milliseconds)


# ---- the request -------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def is_missing(experts, places, pair, end):
    """Whether the expert of a pair is out of reach; pairs from `end` on have none."""
    return pair < end and places[uint32(uint32(experts[pair]) << uint32(1))] == uint64(0)


@cuda.jit(device=True, forceinline=True)
def copy_row(to_q, to_d, to, q, d, row, k, thread, threads):
    """Row `to` of (to_q, to_d) <- a row of (q, d), by so many threads."""
    pieces, blocks = uint32(k >> uint32(4)), uint32(k >> uint32(5))         # pieces of 16 bytes
    for first in range(uint32(0), pieces, uint32(threads)):
        piece = uint32(first + thread)
        if piece < pieces:
            w0, w1, w2, w3 = load_words4(q, uint32(uint32(row * pieces + piece) << uint32(4)))
            store_words4(to_q, uint32(uint32(to * pieces + piece) << uint32(4)), w0, w1, w2, w3)
        if piece < blocks:
            to_d[uint32(to * blocks + piece)] = d[uint32(row * blocks + piece)]


@cache
def hand_over_of(warps):
    """A device function for a block of so many warps: asks the host for the experts of a step whose place in `places`
    is (0, 0). wanted: three lists, each `stride` long. Call it behind the wait for the choice, (q, d) and `places`."""
    threads = 32 * warps

    @cuda.jit(device=True, forceinline=True)
    def hand_over(experts, places, q, d, n_rows, n_used, k, weights, words, wanted, stride, to_q, to_d, state, layer,
                  n_experts, lane, warp):
        of_warps = cuda.shared.array(warps, uint32)
        thread, pairs = uint32(uint32(warp << uint32(5)) + lane), uint32(n_rows * n_used)
        gave_up, total = state[uint32(GAVE_UP)], uint32(0)
        for first in range(uint32(0), pairs, uint32(threads)):
            missing = is_missing(experts, places, uint32(first + thread), pairs)
            total = uint32(total + uint32(cuda.syncthreads_count(int32(missing))))
        if gave_up != uint32(0):
            for first in range(uint32(0), uint32(pairs + n_rows), uint32(threads)):
                if uint32(first + thread) < uint32(pairs + n_rows):
                    weights[uint32(first + thread)] = float32(NAN)
            return
        if total == uint32(0):
            return
        for row in range(warp, n_rows, uint32(warps)):
            if cuda.any_sync(0xFFFFFFFF, is_missing(experts, places, uint32(row * n_used + lane),
                                                    uint32(uint32(row + uint32(1)) * n_used))):
                copy_row(to_q, to_d, uint32(row), q, d, uint32(row), k, lane, 32)
        listed = uint32(0)
        for first in range(uint32(0), pairs, uint32(threads)):
            pair = uint32(first + thread)
            missing = is_missing(experts, places, pair, pairs)
            lanes = uint32(cuda.ballot_sync(0xFFFFFFFF, missing))
            if lane == uint32(0):
                of_warps[warp] = uint32(cuda.popc(lanes))
            cuda.syncthreads()
            at = uint32(listed + uint32(cuda.popc(uint32(lanes & uint32(uint32(uint32(1) << lane) - uint32(1))))))
            for other in range(uint32(warps)):
                count = of_warps[other]
                at = uint32(at + (count if other < warp else uint32(0)))
                listed = uint32(listed + count)
            if missing:
                wanted[at] = experts[pair]
                wanted[uint32(stride + at)] = int32(pair // n_used)
                wanted[uint32(uint32(2) * stride + at)] = int32(pair)
            cuda.syncthreads()
        size = uint32(uint32(32) - uint32(cuda.clz(int32(total - uint32(1)))))
        for first in range(total, uint32(uint32(1) << size), uint32(threads)):
            at = uint32(first + thread)
            if at < uint32(uint32(1) << size):
                wanted[at] = int32(n_experts)
                wanted[uint32(stride + at)] = int32(0)
                wanted[uint32(uint32(2) * stride + at)] = int32(-1)
        cuda.syncthreads()
        if thread == uint32(0):
            request = uint32(uint32(state[uint32(ASKED)] + uint32(1)) & uint32(FAILED - 1))
            words[uint32(LAYER)], words[uint32(SIZE)], words[uint32(PRODUCTS)] = layer, size, total
            publish(words, uint32(REQUEST), request)
            state[uint32(ASKED)] = request

    return hand_over


_hand_over = hand_over_of(THREADS // 32)


@cuda.jit
def hand_over_kernel(experts, places, q, d, n_rows, n_used, k, weights, words, wanted, stride, to_q, to_d, state, layer,
                     n_experts):
    """One block of THREADS threads."""
    let_next_begin()
    thread = uint32(cuda.threadIdx.x)
    wait_for_previous()
    _hand_over(experts, places, q, d, n_rows, n_used, k, weights, words, wanted, stride, to_q, to_d, state, layer,
               n_experts, uint32(thread & uint32(31)), uint32(thread >> uint32(5)))


def hand_over(card, request, u, choice, places, n_rows, *, stream=None):
    """The request alone, by a launch: for layers whose gate and up are two matrices, which expert_swiglu does not take.
    u: Quantized [n_rows, k]. places: of the layer's experts, uint64 [n_experts, 2]."""
    card.launch(hand_over_kernel, 1, THREADS, choice.experts.reshape(-1), places.reshape(-1), *u.flat, n_rows,
                choice.n_used, u.q.shape[1], *request.for_hand_over(choice), stream=stream)


# ---- the answer --------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def wait_for_answer(words, state, layer, milliseconds, pause):
    """Whether the host has answered the last request, as soon as that is known. For one thread."""
    asked, gave_up = state[uint32(ASKED)], poll(state, uint32(GAVE_UP)) != uint32(0)
    start, limit = nanoseconds(), uint64(uint64(milliseconds) * uint64(1000000))
    answer = poll(words, uint32(ANSWER))
    while not gave_up and answer != asked and answer < uint32(FAILED) and uint64(nanoseconds() - start) < limit:
        cuda.nanosleep(pause)
        answer = poll(words, uint32(ANSWER))
    if not gave_up and answer != asked:
        gave_up = True
        publish(state, uint32(GAVE_UP), uint32(1))
        publish(words, uint32(TROUBLE), uint32(layer + uint32(1)))
    return not gave_up


@cuda.jit(device=True, forceinline=True)
def arrives_last(state, row, blocks, thread):
    """Whether this block of threads is the last one of so many that call this for the row. What the others wrote
    before, it sees."""
    is_last = cuda.shared.array(1, uint32)
    cuda.syncthreads()
    if thread == uint32(0):
        is_last[uint32(0)] = uint32(arrive(state, uint32(uint32(ARRIVED) + row)) == uint32(blocks - uint32(1)))
        if is_last[uint32(0)] != uint32(0):
            state[uint32(uint32(ARRIVED) + row)] = uint32(0)
    cuda.syncthreads()
    return is_last[uint32(0)] != uint32(0)


@cuda.jit(device=True, forceinline=True)
def finish_row(x, weights, experts, places, row, n, n_used, n_ranks, products, results, words, state, layer,
               milliseconds, thread, threads):
    """Row of x += the weighted sum of its products in the order of rank, when the host has brought those that are
    missing; NaN if it has not. n_ranks: n_used, and one more with a shared expert. By a block of so many threads."""
    answered = cuda.shared.array(1, uint32)
    w, found = cuda.local.array((AHEAD, 4), uint32), cuda.local.array(4, float32)
    if thread == uint32(0):
        pause = uint32(uint32(POLL_PAUSE) * uint32(cuda.gridDim.y))
        answered[uint32(0)] = uint32(wait_for_answer(words, state, layer, milliseconds, pause))
    pair = uint32(row * n_used)
    missing = uint32(cuda.ballot_sync(0xFFFFFFFF, is_missing(
        experts, places, uint32(pair + uint32(thread & uint32(31))), uint32(pair + n_used))))
    cuda.syncthreads()
    line, pieces = uint32(row * uint32(n_used + uint32(1))), uint32(n >> uint32(2))
    for first in range(uint32(0), pieces, uint32(threads)):
        piece = uint32(first + thread)
        if piece < pieces:
            inside = uint32(piece << uint32(2))
            for j in range(4):
                found[j] = float32(0.0)
            for start in range(uint32(0), n_ranks, uint32(AHEAD)):
                for i in range(AHEAD):
                    rank = uint32(start + uint32(i))
                    if rank < n_used and uint32(missing >> rank) & uint32(1):
                        w[i, 0], w[i, 1], w[i, 2], w[i, 3] = load_words4_anew(
                            results, uint32(uint32(pair + rank) * n + inside))
                    elif rank < n_ranks:
                        w[i, 0], w[i, 1], w[i, 2], w[i, 3] = load_words4_past_l1(
                            products, uint32(uint32(line + rank) * n + inside))
                for i in range(AHEAD):
                    rank = uint32(start + uint32(i))
                    if rank < n_ranks:
                        weight = weights[uint32(line + rank)]
                        for j in range(4):
                            found[j] = cuda.fma(weight, word_as_float(w[i, j]), found[j])
            if answered[uint32(0)] == uint32(0):
                for j in range(4):
                    found[j] = float32(NAN)
            at = uint32(row * n + inside)
            x0, x1, x2, x3 = load_floats4(x, at)
            store_floats4(x, at, x0 + found[0], x1 + found[1], x2 + found[2], x3 + found[3])
