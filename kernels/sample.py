"""The next token of every row of logits, chosen on the card: greedy or drawn, with biases, penalties, a token mask and
a seed per slot.

The rows are those of a check (kernels/advance.py): row j * n + i is row j of answer i. Row 0 holds the latest token of
the answer, rows 1, 2, ... hold drafts of the tokens behind it. What is computed for one row of logits x[0 .. V - 1] and
the parameters of its slot is what plain decoding computes there, if all drafts up to this row are right:

 1. Bias, if switched on: x = x + bias. Then penalties, if switched on. `history` counts how often the slot generated
    each token (low 15 bits) and marks the tokens of its prompt (bit 15). The tokens of rows 1 to j count as generated,
    too. For a token in either, x = x / repetition if x > 0 else x * repetition. For a token generated n > 0 times,
    x = x - (n * frequency + presence).
 2. Mask, if switched on: x = -inf for every token whose bit is 0 (bit i % 32 of word i // 32). Each row of a slot's
    check has its own mask.
 3. Temperature 0 or less: the token with the largest x, the lowest id of equal ones. Done.
 4. Weights: W = round(exp((x - max x) / temperature) * 2^30), an integer from 0 to 2^30. From here on the distribution
    *is* these integers. Their sums are exact, so no order of additions, no card and no block size changes a token.
    Tokens less likely than 2^-31 of the likeliest have W = 0 and are never drawn.
 5. Tokens are ranked by W, the largest first, equal ones by id. A prefix of this ranking is kept:
    top_k: the first top_k tokens (0: off);
    top_p: the shortest prefix of those with at least top_p of their weight, so at least one token (1 or more: off;
           top_p counts in steps of 2^-16);
    min_p: tokens with W >= min_p * 2^30 (0: off).
 6. Draw: R is the first 64 bits of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
    for key = seed and counter = the number of the draw, DRAW + j. r = R * total // 2^64. The token is the first, in
    order of id, at which the running sum of the kept weights exceeds r.

Nothing is counted here: kernels/accept.py moves DRAW and `history` on by the tokens that become part of the answer.
The token is -1 where no choice is defined: a logit is NaN, the largest is +inf, or no token is allowed. It is -1 for a
void row, too, whose position is -1.

    logits      float32 [rows, V]             tokens   int32 [rows]          ids, slots, positions  int32 [rows]
    parameters  uint32  [n_slots, 12]         one row as `pack_parameters` makes it
    history     uint16  [n_slots, V]          bias     float32 [n_slots, V]
    mask        uint32  [n_slots * 8, ceil(V / 32)]     row 8 * slot + j for row j of a check
    best, weights, histogram, ...             scratch, see SamplingState; the three launches: see above `find_best`

Pipe: integer, and fp32 for the exponentials. Bytes: 4 V per greedy row. A drawn row reads the logits twice and writes
and reads the weights, 16 V in all, through the second-level cache. The bound is the latency of three launches: 5 us
for a greedy row of V = 248,320 on an H200, 21 us with top_k 20 and top_p 0.95 (benchmarks/results.md, section sample).
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.types import float32, int32, int64, uint32, uint64

from kernels.advance import rows_on
from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import (div_rn, exp, float_as_word, let_next_begin, round_to_int, wait_for_previous,
                                word_as_float)
from kernels.records import CHECK_ROWS

TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, SEED_HIGH, DRAW, FLAGS, REPETITION, FREQUENCY, PRESENCE = range(11)
N_PARAMETERS = 12                    # DRAW is the number of the slot's next random draw
PENALIZED, MASKED, BIASED = 1, 2, 4  # bits of FLAGS
IN_PROMPT, TIMES = 0x8000, 0x7FFF  # bits of a history entry

THREADS = 256                     # of a block of any kernel here
PER_THREAD = 8
CHUNK = PER_THREAD * THREADS      # tokens of a block
MAX_CHUNKS = THREADS              # one chunk for each thread of the block that decides
WARPS = THREADS // 32
ONE = 2**30                       # the largest weight
FIRST_WORD = 0x4E800000           # its float32 bits: rank keys are the distance to it, 0 .. 0x0F000000
BINS = 1024                       # of rank keys, as 10 + 9 + 9 bits
BINS_EACH = BINS // THREADS
BIN_BITS, RESIDUE = 18, 2**18 - 1
DIGIT_BITS, DIGITS = 9, 512
COUNT_SHIFT, RESIDUES = 40, 2**40 - 1  # an entry of the histogram: count, sum of residues
SUM_BITS = 48                     # more than a chunk's weight has
N_PROGRESS, DECIDED, N_CANDIDATES, ARRIVED = 4, 0, 1, 2
NO_TOKEN, UNDECIDED = 0xFFFFFFFF, 0xFFFFFFFE
NO_LIMIT = 0xFFFFFFFF             # more tokens than there are
NAN_KEY, INFINITY_KEY, MINUS_INFINITY_KEY = 0xFFFFFFFF, 0xFF800000, 0x007FFFFF
MINUS_INFINITY = float("-inf")
EVERY_LANE = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingState:
    """What sampling keeps on a card, in the shapes above. The arrays from `best` on are scratch for up to `rows` rows
    at a time, 8 V bytes of each."""
    parameters: Array
    history: Array
    bias: Array
    mask: Array
    best: Array        # uint32 [rows, chunks, 2]: key of the largest logit, its id
    weights: Array     # uint32 [rows, V]
    histogram: Array   # uint64 [rows, BINS]: of the weights' rank keys
    candidates: Array  # uint32 [rows, V]: ids of tokens that may be the last of the prefix
    sums: Array        # uint64 [rows, chunks]: weight that is kept in any case
    progress: Array    # uint32 [rows, N_PROGRESS]: the token once decided, number of candidates, of blocks arrived

    @classmethod
    def allocate(cls, card, n_slots, rows, n_vocab):
        """All slots greedy, without penalties, biases and mask."""
        if n_vocab > CHUNK * MAX_CHUNKS:
            raise ValueError(f"sampling handles {CHUNK * MAX_CHUNKS} tokens, not {n_vocab}")
        n_chunks = -(-n_vocab // CHUNK)
        return cls(card.zeros((n_slots, N_PARAMETERS), np.uint32, "sampling parameters"),
                   card.zeros((n_slots, n_vocab), np.uint16, "token history"),
                   card.alloc((n_slots, n_vocab), np.float32, "token biases"),
                   card.zeros((n_slots * CHECK_ROWS, -(-n_vocab // 32)), np.uint32, "token masks"),
                   card.alloc((rows, n_chunks, 2), np.uint32, "best of each chunk"),
                   card.alloc((rows, n_vocab), np.uint32, "sampling weights"),
                   card.alloc((rows, BINS), np.uint64, "histogram of the weights"),
                   card.alloc((rows, n_vocab), np.uint32, "sampling candidates"),
                   card.alloc((rows, n_chunks), np.uint64, "weight of each chunk"),
                   card.alloc((rows, N_PROGRESS), np.uint32, "progress of sampling"))


def pack_parameters(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, *, draw=0, repetition=1.0,
                    frequency=0.0, presence=0.0, masked=False, biased=False):
    """One row of `parameters`, uint32 [12]. seed: 0 <= seed < 2**64; draw: the number of the next draw. Penalties are
    switched on when any differs from 1, 0, 0. The mask and the bias of a slot are not read where they are off."""
    row = np.zeros(N_PARAMETERS, np.uint32)
    floats = row.view(np.float32)
    floats[[TEMPERATURE, TOP_P, MIN_P]] = temperature, top_p, min_p
    floats[[REPETITION, FREQUENCY, PRESENCE]] = repetition, frequency, presence
    penalized = (repetition, frequency, presence) != (1.0, 0.0, 0.0)
    row[[TOP_K, SEED, SEED_HIGH, DRAW]] = top_k, seed & 0xFFFFFFFF, seed >> 32, draw
    row[FLAGS] = PENALIZED * penalized + MASKED * bool(masked) + BIASED * bool(biased)
    return row


# ---- reference ---------------------------------------------------------------------------------------------

def adjust_reference(logits, parameters, history, bias, mask):
    """Steps 1 and 2 for one row, float32 [V]; the same bits as the kernels."""
    x, p = logits.astype(np.float32), parameters.view(np.float32)
    if parameters[FLAGS] & BIASED:
        x = x + bias
    if parameters[FLAGS] & PENALIZED:
        n = (history & TIMES).astype(np.float32)
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


def draw_reference(weights, keep, seed, draw):
    """Step 6: the token."""
    kept = [int(w) * int(k) for w, k in zip(weights, keep)]
    low, high = philox_reference(seed, draw)[:2]
    r = ((high << 32 | low) * sum(kept)) >> 64
    for token, w in enumerate(kept):
        r -= w
        if r < 0:
            return token


def philox_reference(seed, draw):
    """Philox4x32-10 for the counter (draw, 0, 0, 0): four words."""
    c0, c1, c2, c3 = draw, 0, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


# ---- reductions over a block -------------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def better(key, i, other_key, other_i):
    """The larger of two keys, with its id; of equal keys the one with the lower id."""
    wins = other_key > key or (other_key == key and other_i < i)
    return (other_key, other_i) if wins else (key, i)


@cuda.jit(device=True, inline="always")
def block_best(key, i, keys, ids, thread):
    """The best key of all threads with its id, in every thread. keys, ids: shared uint32 [WARPS]."""
    for offset in (16, 8, 4, 2, 1):
        other_key = uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(key), offset))
        other_i = uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(i), offset))
        key, i = better(key, i, other_key, other_i)
    if thread & uint32(31) == uint32(0):
        keys[thread >> uint32(5)], ids[thread >> uint32(5)] = key, i
    cuda.syncthreads()
    for warp in range(uint32(WARPS)):
        key, i = better(key, i, keys[warp], ids[warp])
    return key, i


@cuda.jit(device=True)
def running_sum(x, warp_sums, thread):
    """(sum of the uint64 x of all threads before this one, sum of all threads). warp_sums: shared uint64 [WARPS]."""
    own, lane, warp = x, uint32(thread & uint32(31)), uint32(thread >> uint32(5))
    for offset in (1, 2, 4, 8, 16):
        other = uint64(cuda.shfl_up_sync(EVERY_LANE, int64(x), offset))
        x = uint64(x + (other if lane >= uint32(offset) else uint64(0)))
    cuda.syncthreads()  # all threads have read the sums of the last call
    if lane == uint32(31):
        warp_sums[warp] = x
    cuda.syncthreads()
    before, total = uint64(x - own), uint64(0)
    for i in range(uint32(WARPS)):
        other = warp_sums[i]
        before = uint64(before + (other if uint32(i) < warp else uint64(0)))
        total = uint64(total + other)
    return before, total


# ---- the adjusted logits and the best of them --------------------------------------------------------------
# Three launches choose the tokens, the same three for greedy and drawn rows. Each has a block of 256 threads per row
# and chunk of 2,048 tokens. Chunks are fixed ranges of the vocabulary, so the result depends neither on the card nor on
# the rows beside.
#
#   find_best   finds the largest logit of each chunk, and clears the histogram of the row.
#   weigh       finds the largest of all chunks. For a greedy row that is the token. For a drawn row it computes the
#               weights and, for top_k and top_p, their histogram over the *rank key*: the distance of the float32 bits
#               of a weight to those of the largest weight. 1,024 bins cover the keys; a bin spans 1/32 of an octave.
#   choose      draws the token. Every block finds the bins in which the prefix may end. With one limit that is one
#               bin. With both it is a range: its last bin is where top_k ends, its first where top_p would end if
#               top_k left as little weight as it can. The block adds up the weights of its chunk that are kept in any
#               case, and appends the ids in those bins to the row's list of candidates. The block that arrives last
#               finds the exact end of the prefix among the candidates by two more digits of the key, and adds the kept
#               candidates to the sums of their chunks. Then it looks for the token that the random number hits: first
#               its chunk, then a stretch of 8 tokens, then the token.
#
#       rank key    0 ................ first_bin ..... last_bin ........... 960
#                   kept (if min_p)       candidates       not kept
#
# The weight of a bin needs no 64-bit sum in shared memory. Within an octave a weight is a linear function of its key,
# so the count of a bin and the sum of the low 18 bits of its keys give its weight (`weight_of`). Both travel in one
# 64-bit word of the histogram. All of this is integer addition, so the order does not matter.

@cuda.jit(device=True, inline="always")
def parameter(parameters, slot, which):
    return parameters[uint32(slot * uint32(N_PARAMETERS) + uint32(which))]


@cuda.jit(device=True, inline="always")
def float_parameter(parameters, slot, which):
    return word_as_float(parameter(parameters, slot, which))


@cuda.jit(device=True, inline="always")
def token_of(chunk, j, thread):
    """The j-th token of a thread. Neighbouring lanes have neighbouring tokens."""
    return uint32(chunk * uint32(CHUNK) + uint32(j) * uint32(THREADS) + thread)


@cuda.jit(device=True, inline="always")
def load_adjusted(registers, logits, of_slot, drafts, flags, row, chunk, thread, n_vocab):
    """x[j] <- the logit of the thread's j-th token after bias, penalties and mask; -inf past the vocabulary.

    registers: x, float32 [PER_THREAD], and scratch, uint32 [PER_THREAD], which lets all loads be under way at once.
    of_slot: the slot's number, then history, bias, mask and parameters of all slots. drafts: which row of its answer
    the row is, and the ids of all rows.
    """
    x, seen = registers
    slot, history, bias, mask, parameters = of_slot
    step, row_id = drafts
    for j in range(uint32(PER_THREAD)):
        i = token_of(chunk, j, thread)
        x[j] = logits[uint32(row * n_vocab + i)] if i < n_vocab else float32(MINUS_INFINITY)
    if flags & uint32(BIASED):
        for j in range(uint32(PER_THREAD)):
            i = token_of(chunk, j, thread)
            x[j] = x[j] + (bias[uint32(slot * n_vocab + i)] if i < n_vocab else float32(0.0))
    if flags & uint32(PENALIZED):
        for j in range(uint32(PER_THREAD)):
            i = token_of(chunk, j, thread)
            seen[j] = uint32(history[uint32(slot * n_vocab + i)]) if i < n_vocab else uint32(0)
        for back in range(step):
            draft = uint32(row_id[uint32(row - uint32(back) * uint32(cuda.gridDim.y))])
            for j in range(uint32(PER_THREAD)):
                seen[j] = times_one_more(seen[j]) if draft == token_of(chunk, j, thread) else seen[j]
        for j in range(uint32(PER_THREAD)):
            x[j] = penalized(x[j], seen[j], parameters, slot)
    if flags & uint32(MASKED):
        n_words = uint32(uint32(n_vocab + uint32(31)) >> uint32(5))
        for j in range(uint32(PER_THREAD)):
            i = token_of(chunk, j, thread)
            at = uint32(uint32(slot * uint32(CHECK_ROWS) + step) * n_words + uint32(i >> uint32(5)))
            seen[j] = mask[at] if i < n_vocab else uint32(0)
        for j in range(uint32(PER_THREAD)):
            allowed = uint32(seen[j] >> uint32(thread & uint32(31))) & uint32(1)
            x[j] = x[j] if allowed else float32(MINUS_INFINITY)


@cuda.jit(device=True, inline="always")
def times_one_more(seen):
    """The history entry of a token that is generated once more."""
    return uint32(seen + uint32(1)) if uint32(seen & uint32(TIMES)) < uint32(TIMES) else uint32(seen)


@cuda.jit(device=True, inline="always")
def penalized(x, seen, parameters, slot):
    """Step 1 for one logit and its history entry."""
    n = uint32(seen & uint32(TIMES))
    if seen != uint32(0):
        repetition = float_parameter(parameters, slot, REPETITION)
        x = div_rn(x, repetition) if x > float32(0.0) else x * repetition
    if n != uint32(0):
        x = x - (float32(int32(n)) * float_parameter(parameters, slot, FREQUENCY)
                 + float_parameter(parameters, slot, PRESENCE))
    return x


@cuda.jit(device=True, inline="always")
def order_key(x):
    """A word that orders as the floats do. Both zeros have the same key, and every NaN is above all numbers."""
    word = float_as_word(x + float32(0.0))
    key = uint32(~word) if word >> uint32(31) else uint32(word | uint32(0x80000000))
    return key if x == x else uint32(NAN_KEY)


@cuda.jit(device=True, inline="always")
def key_value(key):
    """The float of an `order_key`."""
    return word_as_float(uint32(key ^ uint32(0x80000000)) if key >> uint32(31) else uint32(~key))


@cuda.jit(device=True, inline="always")
def row_of_block(first):
    """-> (the row of this block, which row of its answer it is, the row of the scratch that it uses)."""
    place = uint32(uint32(cuda.blockIdx.z) * uint32(cuda.gridDim.y) + uint32(cuda.blockIdx.y))
    return uint32(first * uint32(cuda.gridDim.y) + place), uint32(first + uint32(cuda.blockIdx.z)), place


@cuda.jit
def find_best(best, histogram, progress, logits, history, bias, mask, parameters, row_id, row_slot, row_pos, first,
              n_vocab):
    """Grid (chunks, answers, rows of an answer from row `first` on): finds the largest adjusted logit of each chunk,
    and clears the sums of a drawn row."""
    x, seen = cuda.local.array(PER_THREAD, float32), cuda.local.array(PER_THREAD, uint32)
    keys, ids = cuda.shared.array(WARPS, uint32), cuda.shared.array(WARPS, uint32)
    let_next_begin()
    thread, chunk, (row, step, place) = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), row_of_block(first)
    slot, void = uint32(row_slot[row]), row_pos[row] < int32(0)
    # Read before the wait, since of the parameters no kernel writes any but DRAW.
    flags = parameter(parameters, slot, FLAGS)
    temperature = float_parameter(parameters, slot, TEMPERATURE)
    wait_for_previous()
    if void:
        return
    of_slot, drafts = (slot, history, bias, mask, parameters), (step, row_id)
    load_adjusted((x, seen), logits, of_slot, drafts, flags, row, chunk, thread, n_vocab)
    key, token = uint32(0), uint32(NAN_KEY)
    for j in range(uint32(PER_THREAD)):
        key, token = better(key, token, order_key(x[j]), token_of(chunk, j, thread))
    key, token = block_best(key, token, keys, ids, thread)
    if thread == uint32(0):
        at = uint32(uint32(place * uint32(cuda.gridDim.x) + chunk) * uint32(2))
        best[at], best[uint32(at + uint32(1))] = key, token
    if chunk == uint32(0) and temperature > float32(0.0):
        for j in range(uint32(BINS // THREADS)):
            histogram[uint32(place * uint32(BINS) + uint32(j) * uint32(THREADS) + thread)] = uint64(0)
        if thread < uint32(N_PROGRESS):
            progress[uint32(place * uint32(N_PROGRESS) + thread)] = uint32(0)


# ---- weights and their histogram ---------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def rank_key(w):
    """The rank key of a weight: 28 bits, spread evenly over the logarithm of the weight. The largest weight has key 0;
    weight 0 has a key of more bits."""
    return uint32(uint32(FIRST_WORD) - float_as_word(float32(int32(w))))


@cuda.jit(device=True, inline="always")
def key_weight(key):
    """The weight of a `rank_key`."""
    return uint32(round_to_int(word_as_float(uint32(uint32(FIRST_WORD) - key))))


@cuda.jit(device=True)
def weight_of(count, residues, start):
    """The total weight of `count` tokens whose rank keys are start + residue. residues: the sum of their residues.

    A weight is (2^24 - (key mod 2^23)) 2^(6 - key div 2^23), so this sum is as exact as the weights are.
    """
    largest = uint64((1 << 24) - uint64(start & uint32(0x7FFFFF)))
    units = uint64(uint64(uint64(count) * largest) - uint64(residues))
    return uint64(uint64(units << uint64(6)) >> uint64(start >> uint32(23)))


@cuda.jit(device=True, inline="always")
def is_ranked(parameters, slot):
    """Whether a row needs the histogram: whether top_k or top_p is on."""
    return (parameter(parameters, slot, TOP_K) != uint32(0)
            or float_parameter(parameters, slot, TOP_P) < float32(1.0))


@cuda.jit
def weigh(weights, histogram, progress, best, logits, history, bias, mask, parameters, row_id, row_slot, row_pos,
          first, n_vocab):
    """Grid as in `find_best`: decides the token of a greedy row; computes the integer weights of a drawn row."""
    x, seen = cuda.local.array(PER_THREAD, float32), cuda.local.array(PER_THREAD, uint32)
    keys, ids = cuda.shared.array(WARPS, uint32), cuda.shared.array(WARPS, uint32)
    counts, residues = cuda.shared.array(BINS, uint32), cuda.shared.array(BINS, uint32)
    let_next_begin()
    thread, chunk, (row, step, place) = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), row_of_block(first)
    slot, void = uint32(row_slot[row]), row_pos[row] < int32(0)
    flags = parameter(parameters, slot, FLAGS)      # before the wait, as in `find_best`
    temperature = float_parameter(parameters, slot, TEMPERATURE)
    wait_for_previous()
    if not void and (chunk == uint32(0) or temperature > float32(0.0)):
        key, token, n_chunks = uint32(0), uint32(NAN_KEY), uint32(cuda.gridDim.x)
        if thread < n_chunks:
            at = uint32(uint32(place * n_chunks + thread) * uint32(2))
            key, token = best[at], best[uint32(at + uint32(1))]
        key, token = block_best(key, token, keys, ids, thread)
        valid = key > uint32(MINUS_INFINITY_KEY) and key < uint32(INFINITY_KEY)
        drawn = valid and temperature > float32(0.0)
        if chunk == uint32(0) and thread == uint32(0):
            progress[uint32(place * uint32(N_PROGRESS) + uint32(DECIDED))] = \
                uint32(UNDECIDED) if drawn else token if valid else uint32(NO_TOKEN)
        if drawn:
            ranked = is_ranked(parameters, slot)
            if ranked:
                for j in range(uint32(BINS // THREADS)):
                    at = uint32(uint32(j) * uint32(THREADS) + thread)
                    counts[at], residues[at] = uint32(0), uint32(0)
                cuda.syncthreads()
            of_slot, drafts = (slot, history, bias, mask, parameters), (step, row_id)
            load_adjusted((x, seen), logits, of_slot, drafts, flags, row, chunk, thread, n_vocab)
            largest = key_value(key)
            for j in range(uint32(PER_THREAD)):
                i = token_of(chunk, j, thread)
                w = uint32(round_to_int(exp(div_rn(x[j] - largest, temperature)) * float32(ONE)))
                if i < n_vocab:
                    weights[uint32(place * n_vocab + i)] = w
                    if ranked and w != uint32(0):
                        rank = rank_key(w)
                        cuda.atomic.add(counts, uint32(rank >> uint32(BIN_BITS)), uint32(1))
                        cuda.atomic.add(residues, uint32(rank >> uint32(BIN_BITS)),
                                        uint32(rank & uint32(RESIDUE)))
            if ranked:
                cuda.syncthreads()
                for j in range(uint32(BINS // THREADS)):
                    at = uint32(uint32(j) * uint32(THREADS) + thread)
                    if counts[at] != uint32(0):
                        cuda.atomic.add(histogram, uint32(place * uint32(BINS) + at),
                                        uint64(uint64(uint64(counts[at]) << uint64(COUNT_SHIFT))
                                               | uint64(residues[at])))


# ---- prefixes of the ranking -------------------------------------------------------------------------------

@cuda.jit(device=True)
def reach(n, w, target, by_weight, found, warp_sums, thread):
    """Finds the bin, in the order of the ranking, with which `target` tokens are reached, or a weight of `target` if
    `by_weight`. n, w: count and weight of this thread's BINS_EACH bins; found: shared uint64 [4].

    -> the bin, how much of the target remains for it, the weight of all bins before it, its count; in every thread.
    (BINS, 0, all weight, 0) if all bins together do not reach the target.
    """
    own_n, own_w = uint64(0), uint64(0)
    for j in range(uint32(BINS_EACH)):
        own_n, own_w = uint64(own_n + uint64(n[j])), uint64(own_w + w[j])
    before_n, _ = running_sum(own_n, warp_sums, thread)
    before_w, all_w = running_sum(own_w, warp_sums, thread)
    if thread == uint32(0):
        found[0], found[1], found[2], found[3] = uint64(BINS), uint64(0), all_w, uint64(0)
    cuda.syncthreads()
    for j in range(uint32(BINS_EACH)):
        before = before_w if by_weight else before_n
        here = w[j] if by_weight else uint64(n[j])
        if before < target and target <= uint64(before + here):
            found[0] = uint64(uint32(thread * uint32(BINS_EACH) + uint32(j)))
            found[1], found[2], found[3] = uint64(target - before), before_w, uint64(n[j])
        before_n, before_w = uint64(before_n + uint64(n[j])), uint64(before_w + w[j])
    cuda.syncthreads()
    bin_, left, above, count = uint32(found[0]), found[1], found[2], uint32(found[3])
    cuda.syncthreads()  # all threads have read `found`
    return bin_, left, above, count


@cuda.jit(device=True)
def share_of(total, top_p):
    """ceil(total * top_p), at least 1, with top_p in steps of 2**-16."""
    share = uint64(max(round_to_int(top_p * float32(65536.0)), int32(0)))
    low = uint64(uint64(uint64(total & uint64(0xFFFF)) * share + uint64(0xFFFF)) >> uint64(16))
    return uint64(max(uint64(uint64(uint64(total >> uint64(16)) * share) + low), uint64(1)))


@cuda.jit(device=True)
def load_bins(n, w, histogram, row, thread):
    """n, w <- count and weight of the thread's bins of a row."""
    for j in range(uint32(BINS_EACH)):
        at = uint32(thread * uint32(BINS_EACH) + uint32(j))
        entry = histogram[uint32(row * uint32(BINS) + at)]
        n[j] = uint32(entry >> uint64(COUNT_SHIFT))
        w[j] = weight_of(n[j], uint64(entry & uint64(RESIDUES)), uint32(at << uint32(BIN_BITS)))


@cuda.jit(device=True, inline="always")
def load_candidates(ids, x, candidates, weights, n_candidates, row_start, part, thread):
    """ids, x <- tokens and weights of this thread's share of CHUNK candidates; the weight is 0 past the last one. Their
    loads are under way at once. ids, x: local uint32 [PER_THREAD]."""
    for j in range(uint32(PER_THREAD)):
        at = token_of(part, j, thread)
        ids[j] = candidates[uint32(row_start + at)] if at < n_candidates else uint32(0)
    for j in range(uint32(PER_THREAD)):
        here = token_of(part, j, thread) < n_candidates
        x[j] = weights[uint32(row_start + ids[j])] if here else uint32(0)


@cuda.jit(device=True)
def select_prefix(target, by_weight, of_row, registers, shared, thread):
    """Finds the shortest prefix of the ranking that holds `target` tokens, or a weight of `target` if `by_weight`, by
    radix selection: first among the bins of the row, then by two digits of the rank keys of the candidates, of which
    its last token is one.

    of_row: see `kept_prefix`; registers, shared: scratch, see `choose`.
    -> (W of the last token, how many tokens of that W the prefix holds, weight of all tokens with a larger W);
    (0, 0, weight of all) if all tokens together do not reach the target.
    """
    row, row_start, weights, histogram, candidates, n_candidates = of_row
    n, w, ids, x = registers
    counts, residues, found, warp_sums = shared
    prefix, above, ties = uint32(0), uint64(0), uint32(0)
    for level in range(uint32(3)):
        if level == uint32(0):
            load_bins(n, w, histogram, row, thread)
        else:
            for j in range(uint32(BINS_EACH)):
                at = uint32(uint32(j) * uint32(THREADS) + thread)
                counts[at], residues[at] = uint32(0), uint32(0)
            cuda.syncthreads()
            shift = uint32(uint32(BIN_BITS) - uint32(DIGIT_BITS) * uint32(level))
            for part in range(uint32(uint32(n_candidates + uint32(CHUNK - 1)) // uint32(CHUNK))):
                load_candidates(ids, x, candidates, weights, n_candidates, row_start, part, thread)
                for j in range(uint32(PER_THREAD)):
                    key = rank_key(x[j])
                    digits = uint32(key >> shift)
                    if uint32(digits >> uint32(DIGIT_BITS)) == prefix:
                        at = uint32(digits & uint32(DIGITS - 1))
                        cuda.atomic.add(counts, at, uint32(1))
                        cuda.atomic.add(residues, at, uint32(key - uint32(digits << shift)))
            cuda.syncthreads()
            for j in range(uint32(BINS_EACH)):
                at = uint32(thread * uint32(BINS_EACH) + uint32(j))
                n[j] = counts[at]
                w[j] = weight_of(n[j], uint64(residues[at]),
                                 uint32(uint32(uint32(prefix << uint32(DIGIT_BITS)) + at) << shift))
        digit, target, before, ties = reach(n, w, target, by_weight, found, warp_sums, thread)
        prefix, above = uint32(uint32(prefix << uint32(DIGIT_BITS)) + digit), uint64(above + before)
    last = uint32(0) if ties == uint32(0) else key_weight(prefix)
    unit = uint64(max(last, uint32(1))) if by_weight else uint64(1)
    return last, uint32(uint64(target + unit - uint64(1)) // unit), above


# ---- the draw ----------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def philox(seed, seed_high, draw):
    """The first 64 bits of Philox4x32-10 for the counter (draw, 0, 0, 0)."""
    c0, c1, c2, c3 = draw, uint32(0), uint32(0), uint32(0)
    k0, k1 = seed, seed_high
    for _ in range(uint32(10)):
        a, b = uint64(uint64(0xD2511F53) * uint64(c0)), uint64(uint64(0xCD9E8D57) * uint64(c2))
        c0, c1 = uint32(uint32(b >> uint64(32)) ^ c1 ^ k0), uint32(b)
        c2, c3 = uint32(uint32(a >> uint64(32)) ^ c3 ^ k1), uint32(a)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return uint64(uint64(c1) << uint64(32)) | uint64(c0)


@cuda.jit(device=True)
def multiply_high(a, b):
    """a * b // 2**64 of two uint64."""
    a0, a1 = uint64(a & uint64(0xFFFFFFFF)), uint64(a >> uint64(32))
    b0, b1 = uint64(b & uint64(0xFFFFFFFF)), uint64(b >> uint64(32))
    middle = uint64(uint64(a1 * b0) + uint64(uint64(a0 * b0) >> uint64(32)))  # cannot overflow
    carry = uint64(uint64(middle & uint64(0xFFFFFFFF)) + uint64(a0 * b1))     # nor this
    return uint64(uint64(a1 * b1) + uint64(middle >> uint64(32)) + uint64(carry >> uint64(32)))


@cuda.jit(device=True, inline="always")
def least_weight(parameters, slot):
    """The smallest weight that min_p keeps."""
    return uint32(round_to_int(min(float_parameter(parameters, slot, MIN_P), float32(1.0)) * float32(ONE)))


@cuda.jit(device=True)
def kept_before(above, n_ties, threshold, ties, warp_sums, thread):
    """The weight that the prefix keeps in each stretch of the vocabulary; thread t has stretch t, in order of id.

    above: weight of the stretch's tokens with W > threshold; n_ties: how many of its tokens have W = threshold. Of
    these the first `ties` of the whole vocabulary are kept. -> weight kept in earlier stretches, in this one, how many
    ties earlier stretches left to it, weight kept in all.
    """
    ties_before, _ = running_sum(uint64(n_ties), warp_sums, thread)
    left = uint32(uint64(ties) - min(uint64(ties), ties_before))
    part = uint64(above + uint64(min(left, n_ties)) * uint64(threshold))
    before, total = running_sum(part, warp_sums, thread)
    return before, part, left, total


@cuda.jit(device=True)
def end_bins(bins, histogram, parameters, row, slot, found, warp_sums, thread):
    """The first and the last of the bins in which the prefix may end: every token of the bins before is kept, none of
    the bins after. (BINS, BINS) without top_k and top_p, and where these keep all tokens. bins: scratch for count and
    weight of the thread's bins."""
    n, w = bins
    first_bin, last_bin = uint32(BINS), uint32(BINS)
    top_k, top_p = parameter(parameters, slot, TOP_K), float_parameter(parameters, slot, TOP_P)
    if is_ranked(parameters, slot):
        load_bins(n, w, histogram, row, thread)
        target = uint64(top_k) if top_k != uint32(0) else uint64(NO_LIMIT)
        last_bin, left, above, _ = reach(n, w, target, False, found, warp_sums, thread)
        first_bin = last_bin
        if top_p < float32(1.0):
            # The least that the tokens kept by top_k can weigh, each of the last bin as little as the bin has. The
            # prefix ends in the bin where top_p of this weight is reached, or after it.
            smallest = weight_of(uint32(left), uint64(0),
                                 uint32(uint32(last_bin + uint32(1)) << uint32(BIN_BITS)))
            first_bin, _, _, _ = reach(n, w, share_of(uint64(above + smallest), top_p), True, found,
                                       warp_sums, thread)
            last_bin = first_bin if last_bin == uint32(BINS) else last_bin
    return first_bin, last_bin


@cuda.jit(device=True)
def kept_prefix(parameters, slot, of_row, registers, shared, thread):
    """-> (threshold, ties): all tokens with W > threshold are kept, and the first `ties` of those with W = threshold.

    of_row: the row's number and first element, weights, histogram and candidates of all rows, the row's number of
    candidates. registers, shared: scratch, see `choose`."""
    threshold, ties, above = uint32(0), uint32(0), uint64(0)
    top_k, top_p = parameter(parameters, slot, TOP_K), float_parameter(parameters, slot, TOP_P)
    for stage in range(uint32(2)):
        by_top_p = stage == uint32(1)
        if top_p < float32(1.0) or (top_k != uint32(0) and not by_top_p):
            target = uint64(top_k) if top_k != uint32(0) else uint64(NO_LIMIT)
            if by_top_p:
                target = share_of(uint64(above + uint64(threshold) * uint64(ties)), top_p)
            threshold, ties, above = select_prefix(target, by_top_p, of_row, registers, shared, thread)
    least = least_weight(parameters, slot)
    if least > threshold:
        threshold, ties = uint32(least - uint32(1)), uint32(0)
    return threshold, ties


@cuda.jit(launch_bounds=THREADS)
def choose(tokens, weights, histogram, candidates, sums, progress, parameters, row_slot, row_pos, first, n_vocab):
    """Grid as in `find_best`: draws the token of a row where `weigh` has not decided it."""
    w, ids = cuda.local.array(PER_THREAD, uint32), cuda.local.array(PER_THREAD, uint32)
    bin_n, bin_w = cuda.local.array(BINS_EACH, uint32), cuda.local.array(BINS_EACH, uint64)
    warp_sums, found = cuda.shared.array(WARPS, uint64), cuda.shared.array(4, uint64)
    counts, residues = cuda.shared.array(BINS, uint32), cuda.shared.array(BINS, uint32)
    chunk_sums, chunk_ties = cuda.shared.array(THREADS, uint64), cuda.shared.array(THREADS, uint32)
    let_next_begin()
    thread, chunk, (row, step, place) = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), row_of_block(first)
    n_chunks, row_start = uint32(cuda.gridDim.x), uint32(place * n_vocab)
    slot, state = uint32(row_slot[row]), uint32(place * uint32(N_PROGRESS))
    void = row_pos[row] < int32(0)
    wait_for_previous()
    decided = uint32(NO_TOKEN) if void else progress[uint32(state + uint32(DECIDED))]
    if decided != uint32(UNDECIDED):
        if chunk == uint32(0) and thread == uint32(0):
            tokens[row] = int32(decided)
    else:
        for j in range(uint32(PER_THREAD)):
            i = token_of(chunk, j, thread)
            w[j] = weights[uint32(row_start + i)] if i < n_vocab else uint32(0)
        first_bin, last_bin = end_bins((bin_n, bin_w), histogram, parameters, place, slot, found, warp_sums, thread)

        # One word per thread: the weight that is kept in any case, and in the bits above it the number of candidates.
        least, own = least_weight(parameters, slot), uint64(0)
        for j in range(uint32(PER_THREAD)):
            at = uint32(rank_key(w[j]) >> uint32(BIN_BITS))
            own = uint64(own + (uint64(w[j]) if at < first_bin and w[j] >= least else uint64(0)))
            is_candidate = at >= first_bin and at <= last_bin
            own = uint64(own + (uint64(1 << SUM_BITS) if is_candidate else uint64(0)))
        before, total = running_sum(own, warp_sums, thread)
        n_own = uint32(total >> uint64(SUM_BITS))
        if thread == uint32(0):
            sums[uint32(place * n_chunks + chunk)] = uint64(total & uint64((1 << SUM_BITS) - 1))
        if n_own != uint32(0):
            if thread == uint32(0):
                found[0] = uint64(cuda.atomic.add(progress, uint32(state + uint32(N_CANDIDATES)), n_own))
            cuda.syncthreads()
            to = uint32(uint32(found[0]) + uint32(before >> uint64(SUM_BITS)))
            for j in range(uint32(PER_THREAD)):
                at = uint32(rank_key(w[j]) >> uint32(BIN_BITS))
                if at >= first_bin and at <= last_bin:
                    candidates[uint32(row_start + to)] = token_of(chunk, j, thread)
                    to = uint32(to + uint32(1))

        # Only the block that arrives last goes on. The fences before and after its count, between barriers, make all
        # that the threads of all blocks have written visible to all threads of this block.
        cuda.syncthreads()
        if thread == uint32(0):
            cuda.threadfence()
            found[1] = uint64(cuda.atomic.add(progress, uint32(state + uint32(ARRIVED)), uint32(1)))
            cuda.threadfence()
        cuda.syncthreads()
        if uint32(found[1]) == uint32(n_chunks - uint32(1)):
            n_candidates = progress[uint32(state + uint32(N_CANDIDATES))]
            of_row = place, row_start, weights, histogram, candidates, n_candidates
            registers, shared = (bin_n, bin_w, ids, w), (counts, residues, found, warp_sums)
            threshold, ties = kept_prefix(parameters, slot, of_row, registers, shared, thread)

            # Thread c stands for chunk c. The kept candidates of the chunk are added to its sum.
            chunk_sums[thread] = sums[uint32(place * n_chunks + thread)] if thread < n_chunks else uint64(0)
            chunk_ties[thread] = uint32(0)
            cuda.syncthreads()
            for part in range(uint32(uint32(n_candidates + uint32(CHUNK - 1)) // uint32(CHUNK))):
                load_candidates(ids, w, candidates, weights, n_candidates, row_start, part, thread)
                for j in range(uint32(PER_THREAD)):
                    if w[j] > threshold:
                        cuda.atomic.add(chunk_sums, uint32(ids[j] // uint32(CHUNK)), uint64(w[j]))
                    elif w[j] == threshold and ties != uint32(0):
                        cuda.atomic.add(chunk_ties, uint32(ids[j] // uint32(CHUNK)), uint32(1))
            cuda.syncthreads()
            before, part, left, total = kept_before(chunk_sums[thread], chunk_ties[thread], threshold, ties,
                                                    warp_sums, thread)
            r = multiply_high(philox(parameter(parameters, slot, SEED),
                                     parameter(parameters, slot, SEED_HIGH),
                                     uint32(parameter(parameters, slot, DRAW) + step)), total)
            if before <= r and r < uint64(before + part):
                found[0], found[1], found[2] = uint64(thread), uint64(r - before), uint64(left)
            cuda.syncthreads()
            start, r, ties = uint32(uint32(found[0]) * uint32(CHUNK)), found[1], uint32(found[2])

            # In the chunk where the running sum exceeds r, thread t stands for the tokens from PER_THREAD * t on.
            above, n_ties = uint64(0), uint32(0)
            for j in range(uint32(PER_THREAD)):
                i = uint32(start + thread * uint32(PER_THREAD) + uint32(j))
                w[j] = weights[uint32(row_start + i)] if i < n_vocab else uint32(0)
                above = uint64(above + (uint64(w[j]) if w[j] > threshold else uint64(0)))
                n_ties = uint32(n_ties + (uint32(1) if w[j] == threshold else uint32(0)))
            before, part, left, _ = kept_before(above, n_ties, threshold, ties, warp_sums, thread)
            if before <= r and r < uint64(before + part):
                for j in range(uint32(PER_THREAD)):
                    kept = w[j] > threshold or (w[j] == threshold and left > uint32(0))
                    left = uint32(left - (uint32(1) if kept and w[j] == threshold else uint32(0)))
                    behind = uint64(before + (uint64(w[j]) if kept else uint64(0)))
                    if before <= r and r < behind:
                        tokens[row] = int32(start + thread * uint32(PER_THREAD) + uint32(j))
                    before = behind


def sample(card, tokens, logits, rows, state, n, width):
    """tokens int32 [n * width] <- choices from logits float32 [n * width, n_vocab], the rows of a check of n answers.
    rows: their ids and places (slots, positions); each slot has one answer at most. state: SamplingState with scratch
    for n rows or more; if for fewer than n * width rows, there are more launches. Never allocates."""
    n_vocab, logits, at_once = state.history.shape[1], logits.reshape(-1), len(state.best) // n
    best, weights, histogram, candidates, sums, progress = (
        array.reshape(-1) for array in (state.best, state.weights, state.histogram, state.candidates,
                                        state.sums, state.progress))
    parameters, history, bias, mask = (array.reshape(-1) for array in (state.parameters, state.history,
                                                                       state.bias, state.mask))
    for first in range(0, width, at_once):
        grid, of_rows = (-(-n_vocab // CHUNK), n, min(at_once, width - first)), (*rows.places, first, n_vocab)
        card.launch(find_best, grid, THREADS, best, histogram, progress, logits, history, bias, mask, parameters,
                    rows.ids, *of_rows)
        card.launch(weigh, grid, THREADS, weights, histogram, progress, best, logits, history, bias, mask, parameters,
                    rows.ids, *of_rows)
        card.launch(choose, grid, THREADS, tokens, weights, histogram, candidates, sums, progress, parameters,
                    *of_rows)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [(4096, {}), (65, {}), (1, {"temperature": 1.0}), (33, {"temperature": 0.7, "masked": True}),
         (4097, {"repetition": 1.3, "frequency": 0.5, "presence": -0.25}),
         (500, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}), (4099, {"biased": True}),
         (4096, {"temperature": 1.5, "min_p": 0.05}),
         (31, {"temperature": 1.0, "top_k": 1}), (4096, {"temperature": 1.0, "top_p": 1e-6}),
         (4096, {"temperature": 8.0, "top_k": 4000, "top_p": 0.999, "repetition": 0.8, "masked": True,
                 "biased": True}),
         (9000, {"temperature": 1.0, "top_p": 0.5, "min_p": 1e-4, "seed": 2**64 - 1, "draw": 7}),
         (2049, {"temperature": 0.3, "top_k": 2**31 - 1, "top_p": 0.0}),
         (2048, {"temperature": 1.0, "min_p": 1.0}),
         (9000, {"temperature": 50.0, "top_k": 8990, "top_p": 0.9, "masked": True})]


def random_state(card, settings, n_vocab, rows):
    """(the host's parameters, history, bias, mask; the SamplingState) of three slots, of which 0 and 2 have these
    settings and 1 others. Scratch is poisoned."""
    rng = np.random.default_rng(n_vocab)
    state = SamplingState.allocate(card, 3, rows, n_vocab)
    history = rng.integers(0, 3, (3, n_vocab)) + IN_PROMPT * rng.integers(0, 2, (3, n_vocab))
    bias = np.round(rng.standard_normal((3, n_vocab)) * 20, 1).astype(np.float32)
    if not settings.get("biased"):
        bias[:] = np.nan
    mask = rng.integers(0, 2**32, state.mask.shape, np.uint32)
    mask[:, 0] |= 1
    parameters = np.stack([pack_parameters(**settings), pack_parameters(0.5), pack_parameters(**settings)])
    host = parameters, history.astype(np.uint16), bias, mask
    for array, values in zip((state.parameters, state.history, state.bias, state.mask), host):
        card.copy_in(array, values)
    for scratch in (state.best, state.weights, state.histogram, state.candidates, state.sums, state.progress):
        card.poison(scratch)
    return host, state


def check(card, case, width=3):
    """A check of two answers, of which the second has one row less. Weights are compared with float64; tokens must be
    exactly those that follow from the card's own integer weights. Returns the largest relative error of a weight above
    2^10."""
    n_vocab, settings = case
    rng, rows = np.random.default_rng(n_vocab), 2 * width
    logits = np.round(rng.standard_normal((rows, n_vocab)) * 3, 1).astype(np.float32)  # with ties
    host, state = random_state(card, settings, n_vocab, rows)
    parameters, history, bias, mask = host
    ids, slots, positions = rng.integers(0, n_vocab, rows), np.tile([2, 0], width), np.arange(rows)
    if width > 1:
        positions[-1] = -1
    tokens = card.alloc(rows + 1, np.int32)
    card.poison(tokens)
    sample(card, tokens[:rows], card.upload(logits), rows_on(card, ids, slots, positions), state, 2, width)
    got, weights, error = card.download(tokens), card.download(state.weights), 0.0
    for row, (slot, position) in enumerate(zip(slots, positions)):
        step, seen = row // 2, history[slot].copy()
        np.add.at(seen, ids[2 + row % 2:row + 1:2], np.uint16(1))
        x = adjust_reference(logits[row], parameters[slot], seen, bias[slot], mask[CHECK_ROWS * slot + step])
        want = int(np.argmax(x))
        if position < 0:
            want = -1
        elif settings.get("temperature", 0) > 0:
            error = max(error, check_weights(weights[row], x, settings["temperature"]))
            want = draw_reference(weights[row], keep_reference(weights[row], parameters[slot]),
                                  settings.get("seed", 0), (int(parameters[slot, DRAW]) + step) % 2**32)
        assert got[row] == want, f"row {row}: token {got[row]}, not {want}"
    for array, values in zip((state.parameters, state.history), host):
        np.testing.assert_array_equal(card.download(array), values)
    assert got[rows] == -1, "wrote on"
    return error


def check_weights(weights, x, temperature):
    """z = (x - max) / temperature has two roundings and exp one ulp, together a relative error of 2^-23 (|z| + 2). The
    last rounding adds 1/2."""
    with np.errstate(invalid="ignore"):
        z = np.maximum((x.astype(np.float64) - x.max()) / temperature, -1e3)
    want = weights_reference(x, temperature)
    excess = np.abs(weights - want) - want * 2.0**-23 * (np.abs(z) + 2)
    assert excess.max() <= 0.5 + 1e-6, f"weight off by {excess.max()}"
    large = want > 2**10
    return np.max(np.abs(weights[large] - want[large]) / want[large])


def cases(card):
    """The checks, then times with the vocabulary of the published models."""
    for n_vocab, settings in CASES:
        yield Case(f"{n_vocab} {settings or 'greedy'}", lambda case=(n_vocab, settings): check(card, case))
    for settings in ({}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 1.0}):
        for n, width in ((1, 1), (1, 8), (8, 3), (64, 1)):
            yield _timed(card, 248320, settings, n, width)


def _timed(card, n_vocab, settings, n, width):
    rows = n * width
    state = SamplingState.allocate(card, n, rows, n_vocab)
    card.copy_in(state.parameters, np.tile(pack_parameters(**settings), (n, 1)))
    logits = np.random.default_rng(0).standard_normal((rows, n_vocab), np.float32) * 3
    inputs = rows_on(card, np.zeros(rows), np.tile(np.arange(n), width), np.arange(rows))
    arrays = card.alloc(rows, np.int32), card.upload(logits), inputs, state, n, width
    return Case(f"{n} x {width} x {n_vocab} {settings or 'greedy'}", launch=lambda: sample(card, *arrays),
                n_bytes=logits.nbytes)


if __name__ == "__main__":
    main("Sampling", cases)
