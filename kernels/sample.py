"""The next token of every row, chosen on the card: greedy or drawn, with penalties, a token mask and a seed
per slot.

What is computed, for one row of logits x[0 .. V - 1] and the parameters of its slot:

 1. Penalties, where switched on. `history` counts how often the slot generated each token (low 15 bits) and
    marks the tokens of its prompt (bit 15). Seen in either: x = x / repetition if x > 0 else x * repetition.
    Generated n > 0 times: x = x - (n * frequency + presence).
 2. Mask, where switched on: x = -inf for every token whose bit is 0 (bit i % 32 of word i // 32).
 3. Temperature 0 or less: the token of the largest x, the lowest id where several are equal. Done.
 4. Weights: W = round(exp((x - max x) / temperature) * 2^30), an integer from 0 to 2^30. From here on the
    distribution *is* these integers: every sum is exact, so no order of additions, no card and no block size
    can change a token. Tokens less likely than 2^-31 of the likeliest have W = 0 and are never drawn.
 5. Tokens are ranked by W, largest first, equal ones by id, and a prefix of this ranking is kept:
    top_k: the first top_k tokens (0: off);
    top_p: of what top_k left, the shortest prefix whose weight is at least top_p of it, so at least one token
           (1 or more: off; top_p counts in steps of 2^-16);
    min_p: tokens with W >= min_p * 2^30 (0: off).
 6. Draw: r = R * total // 2^64 with R the first 64 bits of Philox4x32-10 (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011) for key = seed and counter = step; the token is the first, in order of
    id, at which the running sum of the kept weights exceeds r.

Then the slot's step advances and its history counts the token, both on the card, so that a recorded launch
sequence can be replayed token after token. The token is -1, and nothing advances, where no choice is
defined: a logit is NaN, the largest is +inf, or none is allowed.

    logits      float32 [rows, V]             tokens   int32 [rows]          row_slot  int32 [rows]
    parameters  uint32  [n_slots, 12]         one row as `pack_parameters` makes it
    history     uint16  [n_slots, V]          mask     uint32 [n_slots, ceil(V / 32)]
    best, weights                             scratch, a row each

Three launches, the same for greedy and drawn rows. `find_best`: blocks of 4,096 logits to (largest, id)
each, at memory bandwidth. `weigh` (drawn rows only): the weights. `choose`, one block per row: greedy rows
take the best of the blocks' results and are done. For drawn rows the boundary of a prefix is found by radix
selection, most significant digit first: W as a float32 has 28 significant bits, four digits of 7; the first
digit is the exponent and 2 bits of the mantissa, so that the histogram of a real distribution spreads over
many bins. Counts and weights per bin are integer atomics in shared memory.

Pipe: integer, and fp32 for the exponentials. Bytes: 4 V per row for greedy; a drawn row adds 8 V in `weigh`
and 4 V for each pass of `choose` (1, and 4 each for top_k and top_p) through a single multiprocessor: about
20 us per pass at V = 248,320, which is its weak point.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import div_rn, exp, float_as_word, round_to_int, word_as_float

TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, SEED_HIGH, STEP, FLAGS, REPETITION, FREQUENCY, PRESENCE = range(11)
N_PARAMETERS = 12
PENALIZED, MASKED = 1, 2          # bits of FLAGS
IN_PROMPT, COUNT = 0x8000, 0x7FFF  # bits of a history entry

CHUNK = 4096                      # logits of a block of find_best and weigh
THREADS = 256                     # of those
WARPS = THREADS // 32
CHOOSE_THREADS = 512
CHOOSE_WARPS = CHOOSE_THREADS // 32
SEGMENT = 512                     # weights summed together before the draw walks through them
MAX_SEGMENTS = 1024
DIGIT_BITS, DIGITS = 7, 128
ONE = 2**30                       # the largest weight
KEY_BASE = 0x3F000000             # float32 bits of a weight minus this: 28 bits, 0x00800000 .. 0x0F800000
NO_PREFIX = 0xFFFFFFFF            # digits that no weight has
NO_LIMIT = 0xFFFFFFFF             # more tokens than there are
NAN_KEY, INFINITY_KEY, MINUS_INFINITY_KEY = 0xFFFFFFFF, 0xFF800000, 0x007FFFFF
MINUS_INFINITY = float("-inf")
EVERY_LANE = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingState:
    """What sampling keeps on a card: see the shapes above. `best` and `weights` are scratch for `rows` rows
    at a time."""
    parameters: Array
    history: Array
    mask: Array
    best: Array       # uint32 [rows, chunks, 2]: key of the largest logit, its id
    weights: Array    # uint32 [rows, V]

    @classmethod
    def allocate(cls, card, n_slots, rows, n_vocab):
        """All slots greedy, without penalties and mask."""
        if n_vocab > SEGMENT * MAX_SEGMENTS:
            raise ValueError(f"sampling handles {SEGMENT * MAX_SEGMENTS} tokens, not {n_vocab}")
        return cls(card.zeros((n_slots, N_PARAMETERS), np.uint32, "sampling parameters"),
                   card.zeros((n_slots, n_vocab), np.uint16, "token history"),
                   card.zeros((n_slots, -(-n_vocab // 32)), np.uint32, "token mask"),
                   card.alloc((rows, -(-n_vocab // CHUNK), 2), np.uint32, "best of each chunk"),
                   card.alloc((rows, n_vocab), np.uint32, "sampling weights"))


def pack_parameters(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, step=0, repetition=1.0,
                    frequency=0.0,
                    presence=0.0, masked=False):
    """One row of `parameters`, uint32 [12]. seed: 0 <= seed < 2**64. Penalties count as on when any differs
    from 1, 0, 0."""
    row = np.zeros(N_PARAMETERS, np.uint32)
    floats = row.view(np.float32)
    floats[[TEMPERATURE, TOP_P, MIN_P]] = temperature, top_p, min_p
    floats[[REPETITION, FREQUENCY, PRESENCE]] = repetition, frequency, presence
    penalized = (repetition, frequency, presence) != (1.0, 0.0, 0.0)
    row[[TOP_K, SEED, SEED_HIGH, STEP]] = top_k, seed & 0xFFFFFFFF, seed >> 32, step
    row[FLAGS] = PENALIZED * penalized + MASKED * bool(masked)
    return row


# ---- reference ---------------------------------------------------------------------------------------------

def adjust_reference(logits, parameters, history, mask):
    """Steps 1 and 2 for one row, float32 [V]; the same bits as the kernels."""
    x, p = logits.astype(np.float32), parameters.view(np.float32)
    if parameters[FLAGS] & PENALIZED:
        n = (history & COUNT).astype(np.float32)
        x = np.where(history > 0, np.where(x > 0, x / p[REPETITION], x * p[REPETITION]), x)
        x = np.where(n > 0, x - (n * p[FREQUENCY] + p[PRESENCE]), x)
    if parameters[FLAGS] & MASKED:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:len(x)]
        x = np.where(allowed, x, np.float32(-np.inf))
    return x


def weights_reference(x, temperature):
    """Step 4 in float64, before rounding to an integer."""
    with np.errstate(under="ignore"):
        return np.exp((x.astype(np.float64) - x.max()) / np.float64(temperature)) * ONE


def keep_reference(weights, parameters):
    """Step 5: which tokens are kept, bool [V], from integer weights."""
    p, weights = parameters.view(np.float32), weights.astype(object)  # Python integers
    ranking = [int(i) for i in np.lexsort((np.arange(len(weights)),
                                           -weights.astype(np.int64))) if weights[i] > 0]
    if parameters[TOP_K]:
        ranking = ranking[:int(parameters[TOP_K])]
    if p[TOP_P] < 1:
        share, total = max(int(np.rint(p[TOP_P] * np.float32(2**16))), 0), sum(weights[i] for i in ranking)
        sums = np.cumsum([weights[i] for i in ranking])
        ranking = ranking[:1 + sum(2**16 * int(s) < share * total for s in sums[:-1])]
    least = int(np.rint(min(p[MIN_P], np.float32(1)) * np.float32(ONE)))
    keep = np.zeros(len(weights), bool)
    keep[[i for i in ranking if weights[i] >= least]] = True
    return keep


def draw_reference(weights, keep, seed, step):
    """Step 6: the token."""
    kept = [int(w) * int(k) for w, k in zip(weights, keep)]
    low, high = philox_reference(seed, step)[:2]
    r = ((high << 32 | low) * sum(kept)) >> 64
    for token, w in enumerate(kept):
        r -= w
        if r < 0:
            return token


def philox_reference(seed, step):
    """Philox4x32-10 for the counter (step, 0, 0, 0): four words."""
    c0, c1, c2, c3 = step, 0, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


# ---- the adjusted logits and the best of them --------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def parameter(parameters, slot, which):
    return parameters[uint32(slot * uint32(N_PARAMETERS) + uint32(which))]


@cuda.jit(device=True, inline="always")
def adjusted(logits, history, mask, parameters, row, slot, i, n_vocab):
    """Logit i of a row after penalties and mask."""
    x = logits[uint32(row * n_vocab + i)]
    flags = parameter(parameters, slot, FLAGS)
    masked = flags & uint32(MASKED) != uint32(0)  # tested below, it makes NVVM 12.9 fail
    if flags & uint32(PENALIZED):
        seen = uint32(history[uint32(slot * n_vocab + i)])
        n = uint32(seen & uint32(COUNT))
        repetition = word_as_float(parameter(parameters, slot, REPETITION))
        if seen != uint32(0):
            x = div_rn(x, repetition) if x > float32(0.0) else x * repetition
        if n != uint32(0):
            x = x - (float32(int32(n)) * word_as_float(parameter(parameters, slot, FREQUENCY))
                     + word_as_float(parameter(parameters, slot, PRESENCE)))
    if masked:
        n_words = uint32(uint32(n_vocab + uint32(31)) >> uint32(5))
        word = uint32(mask[uint32(slot * n_words + uint32(i >> uint32(5)))])
        x = x if uint32(word >> uint32(i & uint32(31))) & uint32(1) else float32(MINUS_INFINITY)
    return x


@cuda.jit(device=True, inline="always")
def order_key(x):
    """A word that orders as the floats do; both zeros are equal and every NaN is above all else."""
    word = float_as_word(x + float32(0.0))
    key = uint32(~word) if word >> uint32(31) else uint32(word | uint32(0x80000000))
    return key if x == x else uint32(NAN_KEY)


@cuda.jit(device=True, inline="always")
def key_value(key):
    """The float of an `order_key`."""
    return word_as_float(uint32(key ^ uint32(0x80000000)) if key >> uint32(31) else uint32(~key))


@cuda.jit(device=True, inline="always")
def better(key, i, other_key, other_i):
    """The larger key with its id, the lower id of equal keys."""
    wins = other_key > key or (other_key == key and other_i < i)
    return (other_key, other_i) if wins else (key, i)


@cuda.jit(device=True, inline="always")
def warp_best(key, i):
    for offset in (16, 8, 4, 2, 1):
        other_key = uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(key), offset))
        other_i = uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(i), offset))
        key, i = better(key, i, other_key, other_i)
    return key, i


@cuda.jit
def find_best(best, logits, history, mask, parameters, row_slot, n_vocab):
    """Grid (chunks, rows): the largest adjusted logit of each chunk."""
    keys = cuda.shared.array(WARPS, uint32)
    ids = cuda.shared.array(WARPS, uint32)
    thread, chunk, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    slot = uint32(row_slot[row])
    key, token = uint32(0), uint32(NAN_KEY)
    for j in range(uint32(CHUNK // THREADS)):
        i = uint32(chunk * uint32(CHUNK) + uint32(j) * uint32(THREADS) + thread)
        if i < n_vocab:
            key, token = better(key, token,
                                order_key(adjusted(logits, history, mask, parameters, row, slot, i,
                                                   n_vocab)), i)
    key, token = warp_best(key, token)
    if thread & uint32(31) == uint32(0):
        keys[thread >> uint32(5)], ids[thread >> uint32(5)] = key, token
    cuda.syncthreads()
    if thread == uint32(0):
        for warp in range(uint32(WARPS)):
            key, token = better(key, token, keys[warp], ids[warp])
        at = uint32(uint32(row * uint32(cuda.gridDim.x) + chunk) * uint32(2))
        best[at], best[uint32(at + uint32(1))] = key, token


@cuda.jit(device=True, inline="always")
def best_of_row(best, row, n_chunks):
    key, token = uint32(0), uint32(NAN_KEY)
    for chunk in range(n_chunks):
        at = uint32(uint32(row * n_chunks + uint32(chunk)) * uint32(2))
        key, token = better(key, token, best[at], best[uint32(at + uint32(1))])
    return key, token


# ---- weights -----------------------------------------------------------------------------------------------

@cuda.jit
def weigh(weights, best, logits, history, mask, parameters, row_slot, n_vocab):
    """Grid (chunks, rows): the integer weights of rows that are drawn."""
    thread, chunk, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    slot = uint32(row_slot[row])
    temperature = word_as_float(parameter(parameters, slot, TEMPERATURE))
    if temperature > float32(0.0):
        key, token = best_of_row(best, row, uint32(cuda.gridDim.x))
        largest = key_value(key)
        for j in range(uint32(CHUNK // THREADS)):
            i = uint32(chunk * uint32(CHUNK) + uint32(j) * uint32(THREADS) + thread)
            if i < n_vocab:
                x = adjusted(logits, history, mask, parameters, row, slot, i, n_vocab)
                w = round_to_int(exp(div_rn(x - largest, temperature)) * float32(ONE))
                weights[uint32(row * n_vocab + i)] = uint32(w)


# ---- the choice --------------------------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def philox(seed, seed_high, step):
    """The first 64 bits of Philox4x32-10 for the counter (step, 0, 0, 0)."""
    c0, c1, c2, c3 = step, uint32(0), uint32(0), uint32(0)
    k0, k1 = seed, seed_high
    for _ in range(uint32(10)):
        a, b = uint64(uint64(0xD2511F53) * uint64(c0)), uint64(uint64(0xCD9E8D57) * uint64(c2))
        c0, c1 = uint32(uint32(b >> uint64(32)) ^ c1 ^ k0), uint32(b)
        c2, c3 = uint32(uint32(a >> uint64(32)) ^ c3 ^ k1), uint32(a)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return uint64(uint64(c1) << uint64(32)) | uint64(c0)


@cuda.jit(device=True, inline="always")
def multiply_high(a, b):
    """a * b // 2**64 of two uint64."""
    a0, a1 = uint64(a & uint64(0xFFFFFFFF)), uint64(a >> uint64(32))
    b0, b1 = uint64(b & uint64(0xFFFFFFFF)), uint64(b >> uint64(32))
    middle = uint64(uint64(a1 * b0) + uint64(uint64(a0 * b0) >> uint64(32)))  # cannot overflow
    carry = uint64(uint64(middle & uint64(0xFFFFFFFF)) + uint64(a0 * b1))     # nor this
    return uint64(uint64(a1 * b1) + uint64(middle >> uint64(32)) + uint64(carry >> uint64(32)))


@cuda.jit(device=True, inline="always")
def weight_key(w):
    """28 bits that order as the weights (1 .. 2^30) do, spread evenly over the logarithm of the weight."""
    return uint32(float_as_word(float32(int32(w))) - uint32(KEY_BASE))


@cuda.jit(device=True, inline="always")
def key_weight(key):
    """The weight of a `weight_key`."""
    return uint32(round_to_int(word_as_float(uint32(key + uint32(KEY_BASE)))))


@cuda.jit(device=True, inline="always")
def select_prefix(weights, first, n_vocab, target, by_weight, counts, sums, found, thread):
    """The shortest prefix of the ranking that holds `target` tokens, or a weight of `target` if `by_weight`.

    -> (W of its last token, how many tokens of that W it holds, weight of all larger ones); (0, 0, weight of
    all) if there are fewer than `target` tokens. All threads of the block take part and get the result.
    counts, sums: shared histograms; found: shared [4]: digits of W so far, target left, weight above, ties.
    """
    if thread == uint32(0):
        found[0], found[1], found[2] = uint64(0), target, uint64(0)
    for level in range(uint32(4)):
        shift = uint32(uint32(3 * DIGIT_BITS) - uint32(level) * uint32(DIGIT_BITS))
        if thread < uint32(DIGITS):
            counts[thread], sums[thread] = uint32(0), uint64(0)
        cuda.syncthreads()
        prefix = uint32(found[0])
        for j in range(uint32(uint32(n_vocab + uint32(CHOOSE_THREADS - 1)) // uint32(CHOOSE_THREADS))):
            i = uint32(uint32(j) * uint32(CHOOSE_THREADS) + thread)
            w = weights[uint32(first + i)] if i < n_vocab else uint32(0)
            key = weight_key(w)
            if w != uint32(0) and uint32(key >> shift) >> uint32(DIGIT_BITS) == prefix:
                digit = uint32(uint32(key >> shift) & uint32(DIGITS - 1))
                cuda.atomic.add(counts, digit, uint32(1))
                cuda.atomic.add(sums, digit, uint64(w))
        cuda.syncthreads()
        if thread == uint32(0):
            left, above, digit, reached = found[1], found[2], uint32(DIGITS), False
            while digit > uint32(0) and not reached:
                digit = uint32(digit - uint32(1))
                measure = sums[digit] if by_weight else uint64(counts[digit])
                reached = measure >= left
                if not reached:
                    left, above = uint64(left - measure), uint64(above + sums[digit])
            prefix = uint32(uint32(prefix << uint32(DIGIT_BITS)) | digit)
            found[0] = uint64(prefix) if reached else uint64(NO_PREFIX)
            found[1], found[2], found[3] = left, above, uint64(counts[digit]) if reached else uint64(0)
        cuda.syncthreads()
    key, left, above, ties = uint32(found[0]), found[1], found[2], uint32(found[3])
    cuda.syncthreads()  # everyone has read it
    w = uint32(0) if ties == uint32(0) else key_weight(key)
    unit = uint64(max(w, uint32(1))) if by_weight else uint64(1)
    return w, uint32(min(uint64(uint64(left + unit - uint64(1)) // unit), uint64(ties))), above


@cuda.jit(device=True, inline="always")
def share_of(total, top_p):
    """ceil(total * top_p), at least 1, with top_p in steps of 2**-16."""
    share = uint64(max(round_to_int(top_p * float32(65536.0)), int32(0)))
    low = uint64(uint64(uint64(total & uint64(0xFFFF)) * share + uint64(0xFFFF)) >> uint64(16))
    return uint64(max(uint64(uint64(uint64(total >> uint64(16)) * share) + low), uint64(1)))


@cuda.jit
def choose(tokens, weights, best, history, parameters, row_slot, n_chunks, n_vocab):
    """Grid (rows): the token of a row; then its slot advances."""
    counts = cuda.shared.array(DIGITS, uint32)
    sums = cuda.shared.array(DIGITS, uint64)
    found = cuda.shared.array(4, uint64)
    segment_sums = cuda.shared.array(MAX_SEGMENTS, uint64)
    segment_ties = cuda.shared.array(MAX_SEGMENTS, uint32)
    thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
    lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
    slot, first = uint32(row_slot[row]), uint32(row * n_vocab)

    key, token = best_of_row(best, row, n_chunks)
    valid = key > uint32(MINUS_INFINITY_KEY) and key < uint32(INFINITY_KEY)
    if valid and word_as_float(parameter(parameters, slot, TEMPERATURE)) > float32(0.0):
        # The kept prefix: all W > threshold, and the first `ties` tokens of W = threshold.
        threshold, ties, above = uint32(0), uint32(0), uint64(0)
        top_k, top_p = parameter(parameters, slot, TOP_K), word_as_float(parameter(parameters, slot, TOP_P))
        for stage in range(uint32(2)):
            by_top_p = stage == uint32(1)
            if top_p < float32(1.0) or (top_k != uint32(0) and not by_top_p):
                target = uint64(top_k) if top_k != uint32(0) else uint64(NO_LIMIT)
                if by_top_p:
                    target = share_of(uint64(above + uint64(threshold) * uint64(ties)), top_p)
                threshold, ties, above = select_prefix(weights, first, n_vocab, target, by_top_p, counts,
                                                       sums, found,
                                                       thread)
        least = uint32(round_to_int(min(word_as_float(parameter(parameters, slot, MIN_P)),
                                        float32(1.0)) * float32(ONE)))
        if least > threshold:
            threshold, ties = uint32(least - uint32(1)), uint32(0)

        # Sums of segments, then the segment in which the running sum passes r, then the token in it.
        n_segments = uint32(uint32(n_vocab + uint32(SEGMENT - 1)) // uint32(SEGMENT))
        for j in range(uint32(MAX_SEGMENTS // CHOOSE_THREADS)):
            i = uint32(uint32(j) * uint32(CHOOSE_THREADS) + thread)
            segment_sums[i], segment_ties[i] = uint64(0), uint32(0)
        cuda.syncthreads()
        segment = warp
        while segment < n_segments:
            lane_sum, lane_ties = uint64(0), uint32(0)
            for j in range(uint32(SEGMENT // 32)):
                i = uint32(segment * uint32(SEGMENT) + uint32(j) * uint32(32) + lane)
                w = weights[uint32(first + i)] if i < n_vocab else uint32(0)
                lane_sum = uint64(lane_sum + (uint64(w) if w > threshold else uint64(0)))
                lane_ties = uint32(lane_ties + (uint32(1) if w == threshold else uint32(0)))
            cuda.atomic.add(segment_sums, segment, lane_sum)
            cuda.atomic.add(segment_ties, segment, lane_ties)
            segment = uint32(segment + uint32(CHOOSE_WARPS))
        cuda.syncthreads()
        if thread == uint32(0):
            left, total = ties, uint64(0)
            for i in range(n_segments):
                held = min(left, segment_ties[i])
                left = uint32(left - held)
                total = uint64(total + segment_sums[i] + uint64(held) * uint64(threshold))
            r = multiply_high(philox(parameter(parameters, slot, SEED),
                                     parameter(parameters, slot, SEED_HIGH),
                                     parameter(parameters, slot, STEP)), total)
            left, i = ties, uint32(0)
            held = min(left, segment_ties[i])
            part = uint64(segment_sums[i] + uint64(held) * uint64(threshold))
            while r >= part:
                r, left, i = uint64(r - part), uint32(left - held), uint32(i + uint32(1))
                held = min(left, segment_ties[i])
                part = uint64(segment_sums[i] + uint64(held) * uint64(threshold))
            i = uint32(i * uint32(SEGMENT))
            running = uint64(0)
            while running <= r:
                w = weights[uint32(first + i)]
                if w > threshold:
                    running = uint64(running + uint64(w))
                elif w == threshold and left > uint32(0):
                    running, left = uint64(running + uint64(w)), uint32(left - uint32(1))
                i = uint32(i + uint32(1))
            token = uint32(i - uint32(1))

    if thread == uint32(0):
        tokens[row] = int32(token) if valid else int32(-1)
        if valid:
            at = uint32(slot * uint32(N_PARAMETERS) + uint32(STEP))
            parameters[at] = uint32(parameters[at] + uint32(1))
            if parameter(parameters, slot, FLAGS) & uint32(PENALIZED):
                seen = uint32(history[uint32(slot * n_vocab + token)])
                if uint32(seen & uint32(COUNT)) < uint32(COUNT):
                    history[uint32(slot * n_vocab + token)] = seen + uint32(1)


def sample(card, tokens, logits, row_slot, state, rows, n_vocab, stream=None):
    """tokens int32 [rows] <- logits float32 [rows, n_vocab] of the slots row_slot int32 [rows] (each at most
    once), under `state` (SamplingState). Writes tokens, and step and history of those slots; never
    allocates."""
    n_chunks = -(-n_vocab // CHUNK)
    logits, best, weights = logits.reshape(-1), state.best.reshape(-1), state.weights.reshape(-1)
    history, mask = state.history.reshape(-1), state.mask.reshape(-1)
    parameters = state.parameters.reshape(-1)
    card.launch(find_best, (n_chunks, rows), THREADS, best, logits, history, mask, parameters, row_slot,
                n_vocab,
                stream=stream)
    card.launch(weigh, (n_chunks, rows), THREADS, weights, best, logits, history, mask, parameters, row_slot,
                n_vocab,
                stream=stream)
    card.launch(choose, rows, CHOOSE_THREADS, tokens, weights, best, history, parameters, row_slot, n_chunks,
                n_vocab,
                stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [(4096, {}), (65, {}), (1, {"temperature": 1.0}), (33, {"temperature": 0.7, "masked": True}),
         (4097, {"repetition": 1.3, "frequency": 0.5, "presence": -0.25}),
         (500, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}), (4096, {"temperature": 1.5, "min_p": 0.05}),
         (31, {"temperature": 1.0, "top_k": 1}), (4096, {"temperature": 1.0, "top_p": 1e-6}),
         (4096, {"temperature": 8.0, "top_k": 4000, "top_p": 0.999, "repetition": 0.8, "masked": True}),
         (9000, {"temperature": 1.0, "top_p": 0.5, "min_p": 1e-4, "seed": 2**64 - 1, "step": 7})]


def check(card, case):
    """Three steps of two rows: weights against float64, then the token that follows from the card's own
    integer weights, exactly. Returns the largest relative error of a weight above 2^10."""
    n_vocab, settings = case
    rng = np.random.default_rng(n_vocab)
    slots, state = np.array([2, 0], np.int32), SamplingState.allocate(card, 3, 2, n_vocab)
    logits = np.round(rng.standard_normal((2, n_vocab)) * 3, 1).astype(np.float32)  # with ties
    history = (rng.integers(0, 3, (3, n_vocab)) + IN_PROMPT * rng.integers(0, 2,
                                                                           (3, n_vocab))).astype(np.uint16)
    mask = rng.integers(0, 2**32, state.mask.shape, np.uint32)
    mask[:, 0] |= 1
    parameters = np.stack([pack_parameters(**settings), pack_parameters(0.5), pack_parameters(**settings)])
    for array, host in ((state.parameters, parameters), (state.history, history), (state.mask, mask)):
        card.copy_in(array, host)
    tokens, on_card = card.alloc(3, np.int32), (card.upload(logits), card.upload(slots))
    card.poison(tokens)
    error = 0.0
    for _ in range(3):
        sample(card, tokens[:2], *on_card, state, 2, n_vocab)
        got, weights = card.download(tokens), card.download(state.weights)
        for row, slot in enumerate(slots):
            x = adjust_reference(logits[row], parameters[slot], history[slot], mask[slot])
            want = int(np.argmax(x))
            if settings.get("temperature", 0) > 0:
                error = max(error, check_weights(weights[row], x, settings["temperature"]))
                want = draw_reference(weights[row], keep_reference(weights[row], parameters[slot]),
                                      settings.get("seed", 0), int(parameters[slot, STEP]))
            assert got[row] == want, f"token {got[row]}, not {want}"
            parameters[slot, STEP] += 1
            history[slot, want] += bool(parameters[slot, FLAGS] & PENALIZED)
    np.testing.assert_array_equal(card.download(state.parameters), parameters)
    np.testing.assert_array_equal(card.download(state.history), history)
    assert got[2] == -1, "wrote on"
    return error


def check_weights(weights, x, temperature):
    """z = (x - max) / temperature has two roundings, exp one ulp: a relative error of 2^-23 (|z| + 2), and
    1/2 of the last rounding."""
    with np.errstate(invalid="ignore"):
        z = np.maximum((x.astype(np.float64) - x.max()) / temperature, -1e3)
    want = weights_reference(x, temperature)
    excess = np.abs(weights - want) - want * 2.0**-23 * (np.abs(z) + 2)
    assert excess.max() <= 0.5 + 1e-6, f"weight off by {excess.max()}"
    large = want > 2**10
    return np.max(np.abs(weights[large] - want[large]) / want[large])


def cases(card):
    """The checked cases, and the vocabulary of the published models in time."""
    for n_vocab, settings in CASES:
        yield Case(f"{n_vocab} {settings or 'greedy'}", lambda case=(n_vocab, settings): check(card, case))
    for settings in ({}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 1.0}):
        yield _timed(card, 248320, settings)


def _timed(card, n_vocab, settings):
    state = SamplingState.allocate(card, 1, 1, n_vocab)
    card.copy_in(state.parameters, pack_parameters(**settings)[None])
    logits = np.random.default_rng(0).standard_normal((1, n_vocab), np.float32) * 3
    arrays = card.alloc(1, np.int32), card.upload(logits), card.zeros(1, np.int32)
    return Case(f"{n_vocab} {settings or 'greedy'}", launch=lambda: sample(card, *arrays, state, 1, n_vocab),
                n_bytes=logits.nbytes)


if __name__ == "__main__":
    main("Sampling", cases)
