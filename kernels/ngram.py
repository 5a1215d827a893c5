"""Drafts from what was already written: the text of an answer often repeats itself or its prompt.

The text T of a slot is its prompt, the answer up to the tokens that the last check chose, and behind these the drafts
that another drafter has made, k of them. Its last token is T[l]. A *match* of length m at e < l means that T ends with
the m tokens that end at e, and it counts from m = 3 on. No more than 16 tokens are compared. The longest match says
what may follow, of several of the same length the latest:

    draft[k + q] = T[e + 1 + q mod (l - e)]     q = 0, 1, ...

A match close to the end runs into the drafts that it makes itself. They repeat T[e + 1 .. l], hence the mod.

    T    | prompt | answer ... a b c x y z ... | latest token, at p | COUNT tokens | k drafts |
                             e ^ ^ copied from here                           a     b     c ^ l

    outcomes  int32 [n, 16], answers int32 [n, 12]: see kernels/advance.py. NEXT_DRAFTS of the outcomes hold k drafts at
              least 0, then -1; they are filled up to `most` drafts as far as there is a match, and cut behind `most`
    ids       int32 [n_slots, n_ctx]    T up to position p + COUNT; this kernel writes it from p on, the host before
    most      int32 [n_slots]           drafts that an outcome may hold; 0: the text is written, no match is looked for
    found     uint32 [n_slots, 32], arrived uint32 [n_slots]    scratch of the launch; arrived is 0 between launches

Grid (blocks, answers). A sweep of a block compares CHUNK tokens with T[l], 16 for each thread, all loads under way at
once; where they are equal the thread goes on backwards. A match is the word m * 2^26 + e, so that the best is the
largest. The block that arrives last (kernels/intrinsics.py, `arrive`) takes the best of all blocks and copies. The
blocks beyond the text end at once. Bytes: 4 l per answer; the bound is the latency of two or three dependent loads.

`script` is a drafter for measurements: it copies its drafts from a text that is known beforehand.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numba import cuda
from numba.types import int32, uint32

from kernels.advance import COUNT, N_ANSWER, N_DRAFTS, N_OUTCOME, NEXT_DRAFTS, POSITION, SLOT, TOKEN, TOKENS
from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import arrive, let_next_begin, wait_for_previous
from kernels.records import CHECK_ROWS

LEAST, LONGEST = 3, 16          # tokens of a match
THREADS, PER_THREAD = 128, 16
WARPS = THREADS // 32
CHUNK = THREADS * PER_THREAD    # tokens of a sweep of a block
MOST_BLOCKS, ALL_BLOCKS = 32, 512   # of an answer; of all answers, about
END_BITS = 26                   # of a match's word hold where it ends
TAIL = 1 + CHECK_ROWS + N_DRAFTS    # most tokens from position p on
EVERY_LANE = 0xFFFFFFFF


@dataclass(frozen=True)
class Texts:
    """The texts of all slots on a card, in the shapes above."""
    ids: Array
    most: Array
    found: Array
    arrived: Array

    @classmethod
    def allocate(cls, card, n_slots, n_ctx):
        """No slot looks for matches."""
        if n_ctx > 1 << END_BITS:
            raise ValueError(f"drafts come from texts of {1 << END_BITS} tokens at most, not {n_ctx}")
        return cls(card.alloc((n_slots, n_ctx), np.int32, "texts"), card.zeros(n_slots, np.int32, "drafts of a check"),
                   card.alloc((n_slots, MOST_BLOCKS), np.uint32, "matches in texts"),
                   card.zeros(n_slots, np.uint32, "blocks that looked for matches"))


def ngram_reference(text, n_drafts):
    """The drafts that follow a text, a list of tokens: n_drafts of them or none."""
    last = len(text) - 1
    for length in range(min(LONGEST, last), LEAST - 1, -1):
        for e in range(last - 1, length - 2, -1):
            if text[e + 1 - length:e + 1] == text[last + 1 - length:]:
                return [text[e + 1 + q % (last - e)] for q in range(n_drafts)]
    return []


@cuda.jit(device=True, inline="always")
def token_at(i, start, tail, position, ids):
    """Token i of a text, whose tokens from `position` on are those of `tail`. start: where the text begins in `ids`."""
    return tail[uint32(i - position)] if i >= position else ids[uint32(start + i)]


@cuda.jit(device=True, inline="always")
def match_word(e, start, tail, suffix, position, ids):
    """The word of the match that ends at e, where the last token is equal already; 0 if it does not count."""
    m = uint32(1)
    while m < uint32(LONGEST) and m <= e and token_at(uint32(e - m), start, tail, position, ids) == suffix[m]:
        m = uint32(m + uint32(1))
    return uint32(uint32(m << uint32(END_BITS)) | e) if m >= uint32(LEAST) else uint32(0)


@cuda.jit(device=True, inline="always")
def block_max(x, maxima, thread):
    """The largest uint32 of all threads, in every thread. maxima: shared uint32 [WARPS]."""
    for offset in (16, 8, 4, 2, 1):
        x = max(x, uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(x), offset)))
    cuda.syncthreads()  # all threads have read the maxima of the last call
    if thread & uint32(31) == uint32(0):
        maxima[uint32(thread >> uint32(5))] = x
    cuda.syncthreads()
    for warp in range(uint32(WARPS)):
        x = max(x, maxima[warp])
    return x


@cuda.jit
def ngram_kernel(outcomes, answers, ids, most, found, arrived, n_ctx):
    x = cuda.local.array(PER_THREAD, int32)
    tail, suffix = cuda.shared.array(TAIL, int32), cuda.shared.array(LONGEST, int32)
    maxima, is_last = cuda.shared.array(WARPS, uint32), cuda.shared.array(1, uint32)
    let_next_begin()
    thread, block, i = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    answer, outcome = uint32(i * uint32(N_ANSWER)), uint32(i * uint32(N_OUTCOME))
    drafts = uint32(outcome + uint32(NEXT_DRAFTS))
    wait_for_previous()
    count = outcomes[uint32(outcome + uint32(COUNT))]
    slot, position = uint32(answers[uint32(answer + uint32(SLOT))]), uint32(answers[uint32(answer + uint32(POSITION))])
    if count <= int32(0) or uint32(block * uint32(CHUNK)) >= uint32(position + uint32(TAIL)):
        return
    start, n_chosen, k = uint32(slot * n_ctx), uint32(count), uint32(0)
    for j in range(uint32(N_DRAFTS)):
        k = uint32(j + uint32(1)) if outcomes[uint32(drafts + uint32(j))] >= int32(0) else k
    last, limit = uint32(position + n_chosen + k), min(uint32(most[slot]), uint32(N_DRAFTS))
    if thread < uint32(TAIL):
        token = answers[uint32(answer + uint32(TOKEN))]
        if thread > n_chosen:
            token = outcomes[uint32(drafts + min(uint32(thread - n_chosen), uint32(N_DRAFTS)) - uint32(1))]
        elif thread > uint32(0):
            token = outcomes[uint32(outcome + uint32(TOKENS) + thread - uint32(1))]
        tail[thread] = token
        if block == uint32(0) and thread <= n_chosen and uint32(position + thread) < n_ctx:
            ids[uint32(start + position + thread)] = token
    n_sweeps = uint32(uint32(last + uint32(CHUNK - 1)) // uint32(CHUNK))
    n_blocks = min(n_sweeps, uint32(cuda.gridDim.x))
    if block == uint32(0) and thread >= limit and thread < k:
        outcomes[uint32(drafts + thread)] = int32(-1)
    if limit <= k or block >= n_blocks:
        return
    cuda.syncthreads()
    if thread < uint32(LONGEST):
        suffix[thread] = token_at(uint32(last - thread), start, tail, position, ids) if thread <= last else int32(-1)
    cuda.syncthreads()

    # From the end on: a thread that has found a match of all LONGEST tokens finds no better one.
    best, latest = uint32(0), suffix[uint32(0)]
    for back in range(block, n_sweeps, n_blocks):
        base = uint32(uint32(n_sweeps - uint32(1) - uint32(back)) * uint32(CHUNK) + thread)
        for j in range(uint32(PER_THREAD)):
            e = uint32(base + uint32(j) * uint32(THREADS))
            x[j] = token_at(e, start, tail, position, ids) if e < last else int32(-1)
        hits = uint32(0)
        for j in range(uint32(PER_THREAD)):
            hits = uint32(hits | (uint32(1 << j) if x[j] == latest else uint32(0)))
        while hits != uint32(0) and best < uint32(LONGEST << END_BITS):
            j = uint32(uint32(31) - uint32(cuda.clz(int32(hits))))
            hits = uint32(hits ^ uint32(uint32(1) << j))
            e = uint32(base + j * uint32(THREADS))
            best = max(best, match_word(e, start, tail, suffix, position, ids))
    best = block_max(best, maxima, thread)
    if thread == uint32(0):
        found[uint32(slot * uint32(MOST_BLOCKS) + block)] = best
    cuda.syncthreads()
    if thread == uint32(0):
        is_last[uint32(0)] = uint32(arrive(arrived, slot) == uint32(n_blocks - uint32(1)))
    cuda.syncthreads()
    if is_last[uint32(0)] == uint32(0):
        return
    if thread == uint32(0):
        arrived[slot] = uint32(0)
    best = found[uint32(slot * uint32(MOST_BLOCKS) + thread)] if thread < n_blocks else uint32(0)
    best = block_max(best, maxima, thread)
    if best != uint32(0) and thread < uint32(limit - k):
        e = uint32(best & uint32((1 << END_BITS) - 1))
        copied = uint32(uint32(e + uint32(1)) + thread % uint32(last - e))
        outcomes[uint32(drafts + k + thread)] = token_at(copied, start, tail, position, ids)


@cuda.jit
def script_kernel(outcomes, answers, script, n, n_ctx):
    let_next_begin()
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    wait_for_previous()
    if i < n:
        answer, outcome = uint32(i * uint32(N_ANSWER)), uint32(i * uint32(N_OUTCOME))
        count, slot = outcomes[uint32(outcome + uint32(COUNT))], uint32(answers[uint32(answer + uint32(SLOT))])
        at = uint32(answers[uint32(answer + uint32(POSITION))] + count + int32(1))
        if count > int32(0):
            for j in range(uint32(N_DRAFTS)):
                here = uint32(at + uint32(j))
                outcomes[uint32(outcome + uint32(NEXT_DRAFTS) + uint32(j))] = (
                    script[uint32(slot * n_ctx + here)] if here < n_ctx else int32(-1))


# ---- launches: they write in place and never allocate -----------------------------------------------------

def ngram(card, outcomes, answers, texts, n):
    """For each of n answers: its text gains the tokens that a check chose, and NEXT_DRAFTS of its outcome are filled.
    outcomes int32 [n, 16], after `accept` and after other drafters; answers int32 [n, 12], before the next `advance`;
    texts: Texts."""
    n_ctx = texts.ids.shape[1]
    n_blocks = max(1, min(MOST_BLOCKS, ALL_BLOCKS // n, -(-n_ctx // CHUNK)))
    card.launch(ngram_kernel, (n_blocks, n), THREADS, outcomes.reshape(-1), answers.reshape(-1), texts.ids.reshape(-1),
                texts.most, texts.found.reshape(-1), texts.arrived, n_ctx)


def script(card, outcomes, answers, script, n):
    """NEXT_DRAFTS of each outcome <- the tokens of script int32 [n_slots, n_ctx] behind the position of the outcome's
    last token; -1 beyond n_ctx. outcomes, answers: as in `ngram`."""
    card.launch(script_kernel, -(-n // THREADS), THREADS, outcomes.reshape(-1), answers.reshape(-1),
                script.reshape(-1), n, script.shape[1])


# ---- check and time ----------------------------------------------------------------------------------------

# answers, their lengths at most, different tokens in a text
CASES = [(1, 40, 2), (3, 200, 3), (5, 3000, 4), (2, 9000, 1), (7, 2060, 9), (130, 300, 3), (3, 70_000, 5),
         (4, 5000, 1000)]


def random_texts(rng, n, n_ctx, n_tokens):
    """(answers, outcomes, the whole texts with the drafts that are there, k of each). Texts repeat themselves."""
    answers, outcomes = np.full((n, N_ANSWER), -1, np.int32), np.full((n, N_OUTCOME), -1, np.int32)
    answers[:, SLOT], texts, drafted = rng.permutation(n + 1)[:n], [], rng.integers(0, N_DRAFTS + 1, n)
    for i, k in enumerate(drafted):
        count = rng.integers(1, CHECK_ROWS + 1)
        length = rng.integers(n_ctx // 2 if n_ctx > 100 else count + 1, n_ctx + 1)
        text = rng.integers(0, n_tokens, length + k)
        for _ in range(rng.integers(0, 4)):             # copies of pieces, some of them at the end
            size = rng.integers(1, min(30, len(text)))
            source, to = rng.integers(0, len(text) - size, 2)
            to = len(text) - size if rng.random() < 0.5 else to
            text[to:to + size] = text[source:source + size].copy()
        answers[i, POSITION], answers[i, TOKEN] = length - count - 1, text[length - count - 1]
        outcomes[i, COUNT], outcomes[i, TOKENS:TOKENS + count] = count, text[length - count:length]
        outcomes[i, NEXT_DRAFTS:NEXT_DRAFTS + k] = text[length:]
        texts.append(text.tolist())
    outcomes[rng.random(n) < 0.1, COUNT] = 0
    return answers, outcomes, texts, drafted


def check(card, n, n_ctx, n_tokens):
    """Two rounds of random texts. Drafts and texts must be exact and nothing else may change."""
    rng = np.random.default_rng(n + n_ctx)
    texts = Texts.allocate(card, n + 1, n_ctx)
    card.poison(texts.found)
    for _ in range(2):
        answers, outcomes, written, drafted = random_texts(rng, n, n_ctx, n_tokens)
        most = rng.choice([0, 2, N_DRAFTS, 9], n + 1, p=[.2, .2, .3, .3]).astype(np.int32)
        before, want = np.full((n + 1, n_ctx), -1, np.int32), outcomes.copy()
        for answer, text in zip(answers, written):
            before[answer[SLOT], :answer[POSITION]] = text[:answer[POSITION]]
        after = before.copy()
        for answer, outcome, text, k in zip(answers, want, written, drafted):
            if outcome[COUNT] > 0:
                after[answer[SLOT], :len(text) - k] = text[:len(text) - k]
                outcome[NEXT_DRAFTS + min(most[answer[SLOT]], N_DRAFTS):] = -1
                drafts = ngram_reference(text, max(min(most[answer[SLOT]], N_DRAFTS) - k, 0))
                outcome[NEXT_DRAFTS + k:NEXT_DRAFTS + k + len(drafts)] = drafts
        card.copy_in(texts.ids, before)
        card.copy_in(texts.most, most)
        on_card = card.upload(outcomes), card.upload(answers)
        ngram(card, *on_card, texts, n)
        np.testing.assert_array_equal(card.download(on_card[0]), want)
        np.testing.assert_array_equal(card.download(on_card[1]), answers)
        np.testing.assert_array_equal(card.download(texts.ids), after)
        assert not card.download(texts.arrived).any()
    return 0.0


def check_script(card, n, n_ctx):
    """Drafts are those of the script, -1 beyond its end, and none are made where no token was chosen."""
    rng = np.random.default_rng(n)
    answers, outcomes, *_ = random_texts(rng, n, n_ctx, 5)
    written, want = rng.integers(-1, 99, (n + 1, n_ctx), np.int32), outcomes.copy()
    for answer, outcome in zip(answers, want):
        if outcome[COUNT] > 0:
            drafts = np.append(written[answer[SLOT], answer[POSITION] + outcome[COUNT] + 1:], [-1] * N_DRAFTS)
            outcome[NEXT_DRAFTS:] = drafts[:N_DRAFTS]
    on_card = card.upload(outcomes)
    script(card, on_card, card.upload(answers), card.upload(written), n)
    np.testing.assert_array_equal(card.download(on_card), want)
    return 0.0


def cases(card):
    """The checks, then times: a text without a match, one that repeats a few tokens, one token over and over. Before
    each launch a copy clears the drafts of the one before."""
    for case in CASES:
        yield Case("{} answers of {}, {} tokens".format(*case), partial(check, card, *case))
    yield Case("script", partial(check_script, card, 300, 50))
    copy = card.alloc(N_OUTCOME, np.int32), card.zeros(N_OUTCOME, np.int32)
    yield Case("the copy alone", launch=lambda: card.copy(*copy))
    for n, length, n_tokens in [(1, 300, 50_000), (1, 18_400, 50_000), (1, 18_400, 20), (1, 18_400, 1),
                                (1, 262_144, 50_000), (1, 262_144, 1), (8, 18_400, 50_000), (64, 18_400, 50_000)]:
        yield _timed(card, n, length, n_tokens)


def _timed(card, n, length, n_tokens):
    texts, rng = Texts.allocate(card, n, length), np.random.default_rng(0)
    answers, outcomes = np.zeros((n, N_ANSWER), np.int32), np.full((n, N_OUTCOME), -1, np.int32)
    answers[:, SLOT], answers[:, POSITION], outcomes[:, COUNT], outcomes[:, TOKENS] = np.arange(n), length - 2, 1, 0
    card.copy_in(texts.ids, rng.integers(0, n_tokens, (n, length), np.int32))
    card.copy_in(texts.most, np.full(n, N_DRAFTS, np.int32))
    arrays, fresh = (card.upload(outcomes), card.upload(answers), texts, n), card.upload(outcomes)

    def launch():
        card.copy(arrays[0], fresh)     # without drafts again
        ngram(card, *arrays)

    return Case(f"{n} x {length}, {n_tokens} tokens, and a copy", launch=launch, n_bytes=4 * n * length)


if __name__ == "__main__":
    main("Drafts from the text", cases)
