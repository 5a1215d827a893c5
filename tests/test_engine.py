"""The scheduler and the engine's life: requests that wait, run, end, are cancelled; what is left of them; failures."""

import contextlib
import ctypes
import dataclasses
import gc
import html
import itertools
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from numba import cuda, float32, uint32

import qengine
from api.grammar import at_least
from engine import own_products
from engine.plan import LEAST_CHECKPOINTS, LONGEST_CTX, Work, choose_rows, slowest_seconds
from engine.prefix import pages_for
from kernels import probe, q8_gemm, q8_gemv
from kernels.card import Array, CardError, OutOfMemory
from kernels.emulated import native
from kernels.emulated.card import EmulatedCard
from tests.costs import costs_of, costs_of_27b, costs_of_square, passes_of, work_of
from tests.models import CHUNK, CONTEXT, SLOTS, TINY, load_tiny
from tests.own_card import own_card
from tests.until import PATIENCE, wait_until

LONG = 600                  # a prompt of ten chunks


@pytest.fixture
def own_engine(card):
    """An engine that a test may ruin."""
    engine = load_tiny(card, slots=1)
    yield engine
    engine.close()


def request(seed=0, n_prompt=20, max_tokens=10, **fields):
    ids = np.random.default_rng(seed).integers(0, 4000, n_prompt).tolist()
    drawn = {"temperature": 1.0, "seed": seed, "ignore_eos": True}
    return qengine.Request(ids, max_tokens=max_tokens, **drawn | fields)


def tokens(generation):
    return [delta.token_id for delta in generation]


def alone(engine, request):
    return tokens(engine.submit(request))


def assert_idle(engine, n_slots=SLOTS, n_ctx=CONTEXT):
    """Every slot has come back, once, and every page that is not kept for later prompts; and those can come back."""
    scheduler = engine.scheduler
    assert not scheduler.running and not scheduler.waiting
    assert sorted(scheduler.free_slots) == list(range(n_slots))
    n_pages = engine.stats()["kv_pages"]
    assert n_pages >= n_slots * pages_for(n_ctx) and scheduler.cache.n_available == n_pages
    engine.clear_cache()
    assert sorted(scheduler.cache.free_pages) == list(range(n_pages))


@contextlib.contextmanager
def observed(engine, **actions):
    """Calls actions["prefill"](number of the call, *arguments) before each call of pipeline.prefill, and so on."""
    with pytest.MonkeyPatch.context() as patch:
        for name, action in actions.items():
            patch.setattr(engine.pipeline, name, counted(getattr(engine.pipeline, name), action))
        yield


def counted(original, action):
    numbers = itertools.count(1)

    def call(*arguments, **named):
        action(next(numbers), *arguments)
        return original(*arguments, **named)

    return call


# ---- many requests -----------------------------------------------------------------------------------------


def test_more_requests_than_slots(engine):
    requests = [request(seed, n_prompt=30 * seed + 1, max_tokens=5 + seed) for seed in range(8)]
    want = [alone(engine, r) for r in requests]
    assert [tokens(g) for g in [engine.submit(r) for r in requests]] == want
    assert [len(w) for w in want] == [r.max_tokens for r in requests]
    assert_idle(engine)


def test_timings_tell_waiting_from_reading(engine):
    with engine.scheduler.borrow_slot(1):           # nothing starts meanwhile
        generation = engine.submit(request(3, n_prompt=40, max_tokens=8))
        time.sleep(0.2)
    generation.wait()
    timings, (first, *_, last) = generation.timings(), generation.token_times
    assert timings.waiting > 0.2 and timings.prompt > 0
    assert timings.waiting + timings.prompt == pytest.approx(first - generation.started)
    assert timings.answer == pytest.approx(last - first) and timings.answer_speed == pytest.approx(7 / timings.answer)
    assert timings.prompt_speed == pytest.approx((40 - generation.n_cached) / timings.prompt)


def test_more_slots_than_columns_of_a_product(card, engine):
    requests = [request(seed) for seed in range(11)]
    wide = load_tiny(card, slots=11)
    assert [tokens(g) for g in [wide.submit(r) for r in requests]] == [alone(engine, r) for r in requests]
    wide.close()


def test_nothing_is_read_before_it_is_there(engine):
    """On a card that runs all as late as the order that was asked for allows: weights, inputs and tokens."""
    requests = [request(seed, n_prompt=50 * seed + 1) for seed in range(5)]
    late = load_tiny(EmulatedCard(late=True))
    assert [tokens(g) for g in [late.submit(r) for r in requests]] == [alone(engine, r) for r in requests]
    late.close()


def test_a_card_that_is_far_ahead(card, engine, monkeypatch):
    """Each step is over before the host looks at the tokens of the one before; prompts come and end meanwhile."""
    wide, step = load_tiny(card, slots=2), qengine.Pipeline.step
    monkeypatch.setattr(qengine.Pipeline, "step", lambda pipeline, *arguments: (step(pipeline, *arguments),
                                                                                pipeline.settle())[0])
    requests = [request(0, max_tokens=60), *(request(seed, max_tokens=1) for seed in range(1, 9))]
    assert [tokens(g) for g in [wide.submit(r) for r in requests]] == [alone(engine, r) for r in requests]
    wide.close()


@pytest.fixture
def grouped(monkeypatch):
    """A function that opens an engine on a card, with two groups of answers ready for decode steps, whose results are
    copied to the host in a stream of their own, as those of a real card are."""
    monkeypatch.setattr(qengine, "group_count", lambda n_stages, n_slots: 2)

    def load(card):
        engine = load_tiny(card)
        engine.pipeline.last.sampler.reads = card.stream("reads")
        for slot in range(3):
            engine.pipeline.prepare_slot(slot, request(slot))
            engine.pipeline.set_pages(slot, [slot])
        for group in range(2):
            engine.pipeline.place([qengine.answer_of(group, group, 0)], group)
        return engine

    return load


@pytest.mark.parametrize("log_probs", [False, True])
def test_results_stay_until_they_are_copied(grouped, log_probs):
    """Of first tokens and of steps, read one by one, or queued far ahead on a card that copies as late as it may."""
    def copied(card, n_ahead):
        engine, found, transfer, queued = grouped(card), [], card._transfer, []

        def noted(direction, host, *rest):
            transfer(direction, host, *rest)
            if direction == "out":
                found.append(ctypes.string_at(host, rest[-1]))

        card._transfer, pipeline = noted, engine.pipeline
        pipeline.prefill(list(range(9)), 2, 0)
        first = [lambda row=row: pipeline.sample_row(row, qengine.answer_of(0, 2, row), log_probs=log_probs)
                 for row in range(9)]
        shape = qengine.StepShape(1, log_probs=log_probs)
        for work in first + [lambda step=step: pipeline.step(shape, step % 2) for step in range(12)]:
            queued.append(work())
            if len(queued) == n_ahead:
                pipeline.settle()
                queued.clear()
        pipeline.settle()
        engine.close()
        return found

    want = copied(EmulatedCard(), 1)
    assert len(want) == 21 * (1 + log_probs) and len(set(want)) > 15 * (1 + log_probs)
    assert copied(EmulatedCard(late=True), 21) == want


def test_steps_go_on_while_results_are_copied(grouped):
    """One more of each group, and no further."""
    card = EmulatedCard()
    engine, gate, ends = grouped(card), threading.Event(), []
    pipeline = engine.pipeline
    pipeline.last.sampler.reads.push(gate.wait)
    for step in range(5):
        pipeline.step(qengine.StepShape(1), step % 2)
        ends.append(pipeline.last.worker.ask(card.default_stream.record).result())
    went_on = ends[3].wait(PATIENCE), ends[4].wait(0.5)
    gate.set()
    engine.close()
    assert went_on == (True, False)


def test_a_copy_of_results_that_fails(grouped):
    card = EmulatedCard()
    engine = grouped(card)
    engine.pipeline.last.sampler.reads.push(lambda: 1 / 0)
    with pytest.raises(CardError, match="is broken: division by zero"):
        engine.pipeline.step(qengine.StepShape(1)).read()
    assert engine.pipeline.fault.card == card.name
    engine.close()


def test_a_long_prompt_and_running_answers_take_turns(engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler.turns, "n_pieces", lambda pieces, has_answers: 1)
    order = []
    want = alone(engine, request(3, n_prompt=LONG))
    engine.clear_cache()
    answers = [engine.submit(request(seed, max_tokens=1000)) for seed in (1, 2)]
    for answer in answers:
        next(iter(answer))
    with observed(engine, prefill=lambda n, ids, slot, start, marks, n_pieces: order.append(f"1 of {start}"),
                  continue_prefill=lambda n, n_pieces=None: order.append(f"{n_pieces or 'last'}"),
                  step=lambda n, shape, group: order.append(shape.n)):
        late = engine.submit(request(3, n_prompt=LONG))
        assert tokens(late) == want
    steps = [at for at, done in enumerate(order) if done == 3]          # those of the new answer, too
    runs = [(done, len(list(run))) for done, run in itertools.groupby(order[order.index("1 of 0"):steps[0]])]
    parts = [done for done, n in runs if done != 2]
    begun, rest = [at for at, done in enumerate(parts) if "of" in done], ["1"] * (engine.config.n_layers - 2) + ["last"]
    assert [parts[at + 1:at + engine.config.n_layers] for at in begun] == [rest] * len(begun) and len(begun) > 1
    assert [done for done, n in runs[1::2]] == [2] * (len(runs) // 2)   # steps after every part, and no two parts
    assert all(n == 1 for done, n in runs[::2]) and runs[-1][0] == "last"       # the next step is the new answer's, too
    for answer in answers:
        answer.cancel()
        answer.wait()
    assert_idle(engine)


def test_a_step_is_queued_before_the_tokens_of_the_last_are_read(own_engine, monkeypatch):
    order, read = [], qengine.Tokens.read
    monkeypatch.setattr(qengine.Tokens, "read", lambda tokens: order.append("read") or read(tokens))
    with observed(own_engine, step=lambda n, shape, group: order.append(n)):
        alone(own_engine, request(max_tokens=6))
    assert order == ["read", 1, 2, "read", 3, "read", 4, "read", 5, "read", "read"]     # and no step for nothing


def test_waiting_requests_are_admitted_in_their_order(engine):
    started = []
    with observed(engine, prepare_slot=lambda n, slot, request, number, lag: started.append(request.seed)):
        with engine.scheduler.borrow_slot(1):    # nothing starts before all wait
            waiting = [engine.submit(request(seed, max_tokens=2)) for seed in range(7)]
        for generation in waiting:
            generation.wait()
    assert started == list(range(7))


def test_no_request_waits_for_a_compilation(monkeypatch):
    """Loading has met every kernel that a request or `evaluate` runs, whatever their number of rows."""
    engine, met = load_tiny(EmulatedCard(), chunk=512, slots=9), []
    monkeypatch.setattr(engine.cards[0], "_load", met.append)
    monkeypatch.setattr(native, "_cached", lambda *arguments: met.append(arguments))     # code for blocks of a shape
    fields = {"top_logprobs": 3, "grammar": LLMatcher.grammar_from_regex("[a-z]{10}"), "presence_penalty": 1.0}
    requests = [request(n, n_prompt=n, temperature=n % 2, **fields if n % 5 == 0 else {})
                for n in (1, 2, 5, 17, 33, 100, 601, 130, 512, 64, 65, 3)]
    for generation in [engine.submit(r) for r in requests]:
        generation.wait()
    engine.evaluate(requests[5].prompt_ids)
    assert not met
    engine.close()


@pytest.mark.parametrize("n_sms", [2, 80, 132])
@pytest.mark.parametrize("limit", [64, 512, 4096])
def test_passes_fill_the_card(n_sms, limit):
    """Passes over a prompt are whole pages but for the last, and take no longer than those of the largest size."""
    costs = costs_of_square(n_sms)
    for n in (1, 63, 512, 4620, 10_000):
        passes = passes_of([costs], n, limit)
        assert sum(passes) == n and max(passes) <= limit and not any(rows % 64 for rows in passes[:-1])
        largest = [min(limit, n - start) for start in range(0, n, limit)]
        assert sum(map(costs.product_time, passes)) <= sum(map(costs.product_time, largest))


def test_a_short_prompt_of_9b_is_one_pass():
    """1,024 and 136 rows fill an H200's rounds better and took 2.8 % longer: a pass has a price of its own."""
    work = work_of({(12_352, 4096): 24, (10_240, 4096): 8, (4096, 4096): 32, (24_576, 4096): 32, (4096, 12_288): 32})
    assert passes_of([costs_of(4096, work)], 1160, 4096) == [1160]


def test_passes_avoid_a_last_round_of_few_blocks():
    """1,600 rows are 800 blocks of threads: 8 more than six for each SM. In that round other micro-batches run, too."""
    operations = 20 * 2 * 4096 * 4096
    for kind, rows in ("cuda", 1600), ("emulated", 1536):
        costs = costs_of_square(kind=kind, row_operations=operations)
        assert choose_rows(0, 4608, 1600, 1, slowest_seconds([costs])) == rows


def test_passes_of_27b_on_two_cards():
    """On two H200 a prompt of 4,620 tokens ran at 3,385 tokens/s in passes of 512, at 3,371 in 384 and at 2,863 in 256;
    one of 18,400 at 3,378 in 768 and at 3,296 in 512."""
    stages = [costs_of_27b()] * 2
    short, long = (passes_of(stages, n, 4096) for n in (4620, 18_400))
    assert all(576 <= rows <= 704 for rows in short[:-1])
    assert all(512 <= rows <= 768 for rows in long[:-1]) and sum(long[:6]) > 6 * 640
    slowest = slowest_seconds(stages)
    large, small, least = (slowest(rows, 0) * 18_400 / rows + slowest(rows, 18_400) for rows in (768, 512, 256))
    assert large < small < least


@pytest.mark.parametrize("gigabytes, n_ctx, tops, chunk", [
    (0, 64, 133.8, 512), (2, 64, 133.8, 896), (16, 4096, 133.8, 4800), (24, 4096, 267.6, 8192),
    (6, 65_536, 133.8, 1856), (6, 180_000, 133.8, 512), (16, 4096, 32.6, 1152), (16, 4096, 17, 576),
    (16, 4096, 0.1, 64)])
def test_chunk_fits_memory_and_time(gigabytes, n_ctx, tops, chunk, monkeypatch):
    """The chunk of a 9B: it fits into what weights leave, less the context that was asked for and the states; and it
    takes half a second on an H200, a T4, a throttled card and one that is slow beyond help."""
    work = Work(32, row_operations=13_836_992_512, page_bytes=64 * 32_768, state_bytes=53_477_376)
    costs = costs_of(4096, work, free_bytes=gigabytes << 30)
    monkeypatch.setattr(probe, "dot_speed", lambda card: 1e12 * tops)
    assert costs.chunk_that_fits(pages_for(n_ctx), 1 + LEAST_CHECKPOINTS, 273_920) == chunk


# ---- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_prompt", [90, 99])
def test_a_full_context_ends_an_answer(card, n_prompt):
    small = load_tiny(card, ctx=100, slots=1)
    deltas = list(small.submit(request(n_prompt=n_prompt, max_tokens=None)))
    assert len(deltas) == 100 - n_prompt
    assert [e.finish_reason for e in deltas] == [None] * (len(deltas) - 1) + ["length"]
    with pytest.raises(qengine.RequestError, match="100 tokens. However, your prompt resulted in 100 tokens"):
        small.submit(request(n_prompt=100))
    assert_idle(small, 1, 100)
    small.close()


def test_max_tokens_ends_an_answer(engine):
    deltas = list(engine.submit(request(max_tokens=4)))
    assert [e.finish_reason for e in deltas] == [None, None, None, "length"]


def test_who_reads_on_after_the_end_finds_the_end(engine):
    generation = engine.submit(request(max_tokens=4))
    assert len(tokens(generation)) == 4 and tokens(generation) == []


def test_an_end_token_ends_an_answer_unless_ignored(engine, monkeypatch):
    want = alone(engine, request(max_tokens=8))
    end = next(i for i in range(2, 8) if want[i] not in want[:i])
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({want[end]}))
    deltas = list(engine.submit(request(max_tokens=8, ignore_eos=False)))
    assert [e.token_id for e in deltas] == want[:end + 1] and deltas[-1].finish_reason == "stop"
    assert alone(engine, request(max_tokens=8)) == want
    assert_idle(engine)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_tokens_of_a_request_end_its_answer(engine, ignore_eos):
    free = list(engine.submit(request(max_tokens=8)))
    end = free[5].token_id
    deltas = list(engine.submit(request(max_tokens=8, ignore_eos=ignore_eos, stop_token_ids=[end])))
    n = [delta.token_id for delta in free].index(end) + 1
    assert [delta.token_id for delta in deltas] == [delta.token_id for delta in free[:n]]
    assert (deltas[-1].finish_reason, deltas[-1].text) == ("stop", "")


def test_an_end_that_comes_late(engine):
    """As a request with min_tokens asks for it, where the model would end at once."""
    ends = sorted(engine.tokenizer.eos_ids)
    wanted = {"ignore_eos": False, "logit_bias": dict.fromkeys(ends, 100.0), "max_tokens": 30}
    assert len(list(engine.submit(request(**wanted)))) == 1
    deltas = list(engine.submit(request(**wanted, grammar=at_least(7, {*ends, 5}))))
    assert len(deltas) == 8 and deltas[-1].token_id in ends and deltas[-1].finish_reason == "stop"


def test_answers_that_end_unforeseen_disturb_no_other(engine, monkeypatch):
    """By an end token, while the step after it is queued already; slots and pages go to the next request at once."""
    requests = [request(seed, n_prompt=59 + seed, max_tokens=12) for seed in range(9)]
    whole = [alone(engine, r) for r in requests]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset(w[2 + i % 5] for i, w in enumerate(whole)))
    ends = [next(i for i, token in enumerate(w) if token in engine.tokenizer.eos_ids) for w in whole]
    assert len(set(ends)) > 2
    requests = [dataclasses.replace(r, ignore_eos=False) for r in requests]
    assert [tokens(g) for g in [engine.submit(r) for r in requests]] == [w[:end + 1] for w, end in zip(whole, ends)]
    assert_idle(engine)


def test_stop_strings_across_tokens(engine):
    deltas = list(engine.submit(request(max_tokens=30)))
    text = "".join(e.text for e in deltas)
    cuts = np.cumsum([len(e.text) for e in deltas])
    at = next(int(c) for c in cuts[5:] if text.count(text[c - 2:c + 2]) == 1)
    stop = text[at - 2:at + 2]                  # two letters of one token and two of the next
    for stops in (stop, (stop,), ["never", stop]):
        stopped = list(engine.submit(request(max_tokens=30, stop=stops)))
        assert "".join(e.text for e in stopped) == text[:at - 2]
        assert stopped[-1].finish_reason == "stop" and len(stopped) < len(deltas)
    assert_idle(engine)


# ---- cancellation ------------------------------------------------------------------------------------------


def assert_cancelled(engine, generation, others=()):
    """It ended without a finish reason, all it held has come back, and the slots serve on."""
    generation.wait()
    assert all(e.finish_reason is None for e in generation)
    for other in others:
        other.cancel()
        other.wait()
    assert_idle(engine)


def test_cancelled_while_waiting(engine):
    want = alone(engine, request(9))
    running = [engine.submit(request(seed, max_tokens=900)) for seed in range(SLOTS)]
    waiting = engine.submit(request(5))
    waiting.cancel()
    waiting.wait()
    assert waiting.n_generated == 0 and all(0 <= g.n_generated < 900 for g in running)
    assert_cancelled(engine, waiting, running)
    assert alone(engine, request(9)) == want


def test_each_pass_of_a_prompt_that_is_read_alone_is_timed(engine, monkeypatch):
    """Also one that is queued whole. Otherwise passes take longer and longer towards the end of a long prompt, and a
    cancelled one keeps the card."""
    turns, spans = engine.scheduler.turns, []
    add_part = turns.add_part
    monkeypatch.setattr(turns, "add_part", lambda seconds, span, *rest: (spans.append(span),
                                                                         add_part(seconds, span, *rest)))
    monkeypatch.setattr(turns, "n_pieces", lambda pieces, has_answers: len(pieces))
    engine.submit(request(5, n_prompt=LONG)).wait()
    engine.clear_cache()
    assert len(spans) > 2 and all(spans)


def test_cancelled_between_the_chunks_of_its_prompt(engine):
    want, calls, submitted = alone(engine, request(9)), [], threading.Event()

    def cancel_in_the_third(n, *arguments):
        submitted.wait()
        calls.append(n)
        if n == 3:
            generation.cancel()

    with observed(engine, prefill=cancel_in_the_third):
        generation = engine.submit(request(5, n_prompt=LONG))
        submitted.set()
        generation.wait()
    assert calls == [1, 2, 3]
    assert_cancelled(engine, generation)
    assert alone(engine, request(9)) == want


def test_cancelled_while_it_answers(engine):
    want = alone(engine, request(9))
    generation = engine.submit(request(5, max_tokens=900))
    next(iter(generation))
    generation.cancel()
    assert_cancelled(engine, generation)
    assert 0 < generation.n_generated < 900
    assert alone(engine, request(9)) == want


def test_cancelled_at_random(engine):
    """Forty requests, cancelled at any moment, from any thread; whoever was not cancelled has its tokens."""
    rng = np.random.default_rng(1)
    requests = [request(seed, n_prompt=int(rng.integers(1, 150)), max_tokens=6) for seed in range(8)]
    want = [alone(engine, r) for r in requests]
    generations = [engine.submit(requests[i % 8]) for i in range(40)]
    doomed = [g for g in generations if rng.random() < 0.5]
    timers = [threading.Timer(rng.random() * 2, g.cancel) for g in doomed]
    for timer in timers:
        timer.start()
    for i, generation in enumerate(generations):
        got = tokens(generation)
        assert got == want[i % 8][:len(got)] and (generation in doomed or len(got) == 6)
    for timer in timers:
        timer.join()
    assert_idle(engine)


# ---- what a slot remembers ---------------------------------------------------------------------------------


def test_nothing_is_left_of_the_last_request(own_engine):
    want = alone(own_engine, request(1, n_prompt=70))
    for other in (request(2, n_prompt=200), request(3, n_prompt=1, temperature=0.0)):
        alone(own_engine, other)
        assert alone(own_engine, request(1, n_prompt=70)) == want


def test_undefined_memory_is_never_used(engine):
    """Every array but the weights full of NaN: the same tokens, alone and side by side, and the same logits."""
    fields = {}, {"top_logprobs": 3}, {"presence_penalty": 1.0}, {"logit_bias": {7: 3.0}}, {"top_k": 5}
    requests = [request(seed, n_prompt=40 * seed + 3, **fields[seed]) for seed in range(5)]
    want = [alone(engine, r) for r in requests]
    logits = engine.evaluate(requests[2].prompt_ids)
    poison(engine)
    assert [tokens(g) for g in [engine.submit(r) for r in requests]] == want
    poison(engine)
    np.testing.assert_array_equal(engine.evaluate(requests[2].prompt_ids), logits)


def poison(engine):
    engine.clear_cache()
    stage = engine.pipeline.last
    model, cache = stage.model, stage.cache
    arrays = [value for name, value in vars(model).items() if name not in ("inv_freq", "head_norm")]
    arrays += [*model.scratch.arrays.values(), model.attention_scratch.partials, *cache.states, cache.block_table,
               stage.inputs, *(array for pages in cache.pages.values() for array in pages)]
    parts = stage.sampler, stage.sampler.state, stage.sampler.log_probs
    arrays += [value for part in parts for value in vars(part).values()]
    arrays = [value for value in arrays if isinstance(value, Array)]
    arrays = list({array.ptr: array for array in arrays}.values())
    assert len(arrays) > 30
    for array in arrays:
        engine.cards[0].poison(array)


# ---- evaluate ----------------------------------------------------------------------------------------------


def test_evaluate_while_requests_run(engine):
    ids, running = request(4, n_prompt=150).prompt_ids, request(5, max_tokens=400)
    logits, want, is_seen = engine.evaluate(ids), alone(engine, running), threading.Event()

    def held(n, *arguments):        # the answer is not over before the evaluation begins, nor before it is looked at
        if n > 100:
            wait_until(lambda: engine.scheduler.guests or is_seen.is_set())

    with observed(engine, step=held):
        generation = engine.submit(running)
        next(iter(generation))
        np.testing.assert_array_equal(engine.evaluate(ids), logits)
        assert generation.n_generated < 200         # it did not wait for the answer's end
        is_seen.set()
        assert want[1:] == tokens(generation)
    assert_idle(engine)


@pytest.mark.parametrize("n_tokens", [1, qengine.HEAD_ROWS, CHUNK + 3])
def test_rows_of_logits_come_a_few_at_a_time(engine, n_tokens):
    ids = request(5, n_prompt=n_tokens).prompt_ids
    parts = list(engine.logit_rows(ids))
    np.testing.assert_array_equal(np.concatenate(parts), engine.evaluate(ids))
    assert max(map(len, parts)) <= qengine.HEAD_ROWS
    assert_idle(engine)


def test_rows_of_logits_that_nobody_takes(engine):
    rows = engine.logit_rows(request(5).prompt_ids)
    next(rows)
    rows.close()
    assert_idle(engine)
    assert alone(engine, request())


def test_evaluate_needs_a_free_slot(engine):
    generations = [engine.submit(request(seed, max_tokens=900)) for seed in range(SLOTS)]
    for generation in generations:
        next(iter(generation))
    with pytest.raises(qengine.RequestError, match="every slot is taken"):
        engine.evaluate([1, 2])
    for generation in generations:
        generation.cancel()
        generation.wait()
    assert engine.evaluate([1, 2]).shape == (2, 4096)
    assert_idle(engine)


# ---- a reader's kernels ------------------------------------------------------------------------------------


def test_products_of_a_reader(own_engine):
    """They are checked at every shape, then launched in the place of the engine's, recordings included."""
    gemv, gemm, asked = Counting(q8_gemv.gemv_q8_q8), Counting(q8_gemm.gemm_q8_q8), request(n_prompt=70)
    before = alone(own_engine, asked)
    model = own_engine.pipeline.last.model
    shapes = {(m.n, m.k) for part in (*model.layers, model.head) for m in qengine.matrices(part)}
    own_engine.use(gemv=gemv)
    assert set(gemv.shapes) == shapes and gemm.shapes == []
    checked = len(gemv.shapes)
    assert alone(own_engine, asked) == before       # the norm and SwiGLU apart from the products: the same bits
    assert len(gemv.shapes) > checked               # of the first token, and of recordings
    own_engine.use(gemv, gemm)
    assert set(gemm.shapes) == shapes
    assert alone(own_engine, asked) == before
    own_engine.use()
    calls = len(gemv.shapes), len(gemm.shapes)
    assert alone(own_engine, asked) == before and calls == (len(gemv.shapes), len(gemm.shapes))


class Counting:
    """A product of Q8_0 that keeps the shapes which it was called with."""

    def __init__(self, product):
        self.product, self.shapes = product, []

    def __call__(self, *arguments):
        self.product(*arguments)
        w = arguments[3]
        self.shapes.append((w.n, w.k))


def forgets_scales(card, y, stride, w, x, columns, add):
    ones = dataclasses.replace(w, scales=card.upload(np.ones(w.scales.shape, w.scales.dtype)))
    q8_gemv.gemv_q8_q8(card, y, stride, ones, x, columns, add)


def of_fewer_bits(card, y, stride, w, x, columns, add, stream=None):
    """A product of the weights without their last two bits, as if they had six."""
    values = card.download(w.values)
    few = dataclasses.replace(w, values=card.upload((values.view(np.int8) & ~3).view(values.dtype)))
    q8_gemm.gemm_q8_q8(card, y, stride, few, x, columns, add, stream=stream)


def writes_nothing(card, y, stride, w, x, columns, add):
    pass


@pytest.mark.parametrize("product, approximate", [({"gemv": 3}, False), ({"gemm": "x"}, True)])
def test_products_are_functions(own_engine, product, approximate):
    with pytest.raises(ValueError, match=r"^a product of yours is a function, and not (3|'x')$"):
        own_engine.use(**product, approximate=approximate)
    assert own_engine.generate("one two", max_tokens=4)


def test_products_take_seven_arguments(own_engine):
    """A kernel is refused in a sentence, and so is a function of other arguments."""
    @cuda.jit
    def of_numba(y):
        pass

    for product, said in ((of_numba, "^of_numba is a kernel; .* that launches it$"),
                          (lambda y, w, x: None, r"is called with \(card, y, stride, w, x, columns, add\): too many")):
        with pytest.raises(ValueError, match=said):
            own_engine.use(gemv=product)


def test_approximate_products_are_measured(card):
    """Their errors are those of the bits that are missing, and text and speed of before and now are told."""
    with contextlib.closing(load_tiny(card, slots=1)) as engine:
        asked = engine.generate(engine.template.render([{"role": "user", "content": "one two three"}]),
                                max_tokens=own_products.ANSWER_TOKENS)
        with pytest.raises(ValueError, match="of_fewer_bits, .*: other numbers"):
            engine.use(gemm=of_fewer_bits)
        exact = engine.use(gemv=q8_gemv.gemv_q8_q8, approximate=True)
        assert exact.errors[0].share < 1e-6 and exact.before.ids == exact.now.ids and "the same text" in repr(exact)
        report = engine.use(gemm=of_fewer_bits, approximate=True, question="one two three")
        error, = report.errors
        assert error.product == "of_fewer_bits" and 0.005 < error.share < 0.05      # of 127 steps, 1.5 on average
        assert report.before.text == asked
        again = engine.use(gemm=of_fewer_bits, approximate=True, question="one two three")
        assert again.before.ids == report.before.ids and again.now.ids == report.now.ids != again.before.ids
        assert min(report.before.prompt_speed, report.now.answer_speed) > 0
        for words in "of_fewer_bits", "tokens/s before", report.now.text[:10]:
            assert words in repr(report) and html.escape(words) in report._repr_html_()
        for wrong, message in (writes_too_much, "wrote elsewhere"), (writes_nothing, "no numbers"):
            with pytest.raises(ValueError, match=message):
                engine.use(gemv=wrong, approximate=True)


def writes_too_much(card, y, stride, w, x, columns, add):
    q8_gemv.gemv_q8_q8(card, y, stride, w, x, columns, add)
    card.fill(y.reshape(-1)[w.n:w.n + 1], 0)


@cuda.jit
def store_far(y, n):
    i = uint32(cuda.grid(1))
    if i < n:
        y[uint32(i + uint32(3 << 30))] = float32(1)             # 12 GB away


def writes_far(card, y, stride, w, x, columns, add):
    card.launch(store_far, 1, 64, y.reshape(-1), w.n)


def test_products_that_write_far_away_are_refused():
    """With the kernel, the line and the thread. On an emulated card such a store would end this Python."""
    with contextlib.closing(load_tiny(EmulatedCard(), slots=1)) as engine:
        before = alone(engine, request())
        for name, approximate in itertools.product(("gemv", "gemm"), (False, True)):
            with pytest.raises(ValueError, match=r"^writes_far, a matrix of .* x: store_far \(.*, line \d+\), "
                                                 r"block \(0, 0, 0\), thread .*: writes 4 bytes at"):
                engine.use(**{name: writes_far}, approximate=approximate)
        assert alone(engine, request()) == before
        assert_idle(engine, n_slots=1)


def forgets_drafts(card, y, stride, w, x, columns, add):
    q8_gemv.gemv_q8_q8(card, y, stride, w, x, min(columns, 8), add)


def test_products_are_checked_with_the_rows_of_the_widest_step(card):
    """Which are those of all answers with all their drafts."""
    engine = load_tiny(card, slots=4)
    with pytest.raises(ValueError, match="forgets_drafts, .*, 32 rows of x"):
        engine.use(gemv=forgets_drafts)
    engine.close()


@pytest.mark.parametrize("product, message", [(forgets_scales, "forgets_scales, a matrix of .*: other numbers"),
                                              (writes_too_much, "writes_too_much, .*: wrote elsewhere")])
def test_wrong_products_are_refused(own_engine, product, message):
    """Nothing changes then."""
    before = alone(own_engine, request())
    for name in ("gemv", "gemm"):
        with pytest.raises(ValueError, match=message):
            own_engine.use(**{name: product})
    assert alone(own_engine, request()) == before
    assert_idle(own_engine, n_slots=1)


# ---- requests that are refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name, values", {
    "max_tokens": (0, -1, 1.5, True, 2**31), "temperature": (-0.1, 2.1, float("nan"), "hot", None),
    "top_k": (-1, 0.5), "top_p": (1.1, -1), "min_p": (2,), "seed": (-1, 2**64, 0.5),
    "stop": ("", ["a", ""], "a" * 1025, ["a"] * 65),
}.items())
def test_what_a_request_may_not_ask(engine, name, values):
    for value in values:
        with pytest.raises(qengine.RequestError) as caught:
            engine.submit(dataclasses.replace(request(), **{name: value}))
        assert caught.value.field == name
    assert_idle(engine)


def test_numbers_of_numpy_are_numbers(engine):
    fields = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(40), "seed": np.uint64(7)}
    assert len(alone(engine, request(**fields))) == 3


@pytest.mark.parametrize("ids", [[], [4096], [-1]], ids=str)
def test_prompts_that_are_refused(engine, ids):
    with pytest.raises(qengine.RequestError) as caught:
        engine.submit(qengine.Request(ids))
    assert caught.value.field == "prompt"


# ---- failures ----------------------------------------------------------------------------------------------


def test_nan_in_the_logits_ends_the_engine(card, own_engine):
    card.poison(own_engine.pipeline.last.model.head_norm)
    with own_engine.scheduler.borrow_slot(1):    # all three are waiting when it happens
        generations = [own_engine.submit(request(seed)) for seed in range(3)]
    for generation in generations:
        with pytest.raises(qengine.EngineStopped, match="the engine has stopped: the logits hold a NaN"):
            list(generation)
    assert "NaN" in own_engine.reason
    for refused in (lambda: own_engine.submit(request()), lambda: own_engine.evaluate([1])):
        with pytest.raises(qengine.EngineStopped, match="NaN"):
            refused()


def test_a_card_that_fails_ends_the_engine(own_engine):
    def fail(n, *arguments):
        raise CardError("the card fell off the bus")

    generation = own_engine.submit(request(max_tokens=900))
    next(iter(generation))
    with observed(own_engine, step=fail), pytest.raises(qengine.EngineStopped, match="fell off the bus"):
        list(generation)


def test_an_error_of_our_own_is_logged(own_engine, caplog):
    with observed(own_engine, step=lambda n, *arguments: 1 / 0), caplog.at_level(logging.ERROR):
        with pytest.raises(qengine.EngineStopped, match="^the engine has stopped after an internal error$"):
            list(own_engine.submit(request()))
    assert "ZeroDivisionError" in caplog.text


def test_closing_ends_what_runs_and_waits(card):
    engine = load_tiny(card, slots=1)
    generations = [engine.submit(request(seed, max_tokens=900)) for seed in range(2)]
    next(iter(generations[0]))
    engine.close()
    for generation in generations:
        generation.wait()
        assert all(e.finish_reason is None for e in generation)
    assert engine.reason is None
    with pytest.raises(qengine.EngineStopped, match="was closed"):
        engine.submit(request())
    with pytest.raises(qengine.EngineStopped, match="was closed"):
        engine.evaluate([1, 2])
    engine.close()


def test_closing_gives_what_runs_and_waits_some_time(card, engine):
    closing = load_tiny(card, slots=1)
    requests = [request(seed, max_tokens=30) for seed in range(2)]
    generations = [closing.submit(r) for r in requests]
    next(iter(generations[0]))
    thread = threading.Thread(target=closing.close, args=[60.0])
    thread.start()
    while not closing.scheduler.draining:
        pass
    with pytest.raises(qengine.EngineStopped, match="was closed"):
        closing.submit(request())
    thread.join()
    assert [generation.n_generated for generation in generations] == [30, 30]
    assert tokens(generations[1]) == alone(engine, requests[1])


# ---- loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes, way_out", [(4, "nothing else of its size would"),
                                                (25, "it would with --slots 2 or --ctx 960 or")])
def test_memory_that_does_not_suffice_is_shown(megabytes, way_out):
    with pytest.raises(OutOfMemory, match=rf"tiny does not fit:\n.*\nemulated card 0 .* too much\n{way_out}"):
        load_tiny(EmulatedCard(memory_bytes=int(megabytes * 2 ** 20)), chunk=CONTEXT, draft="off")


def test_memory_that_suffices_for_fewer_pages(engine):
    """Each request has the whole context, but not all at the same time."""
    requests = [request(seed, n_prompt=CONTEXT - 100, max_tokens=20 + seed) for seed in range(SLOTS)]
    small = load_tiny(EmulatedCard(memory_bytes=9 << 20), draft="off")
    n_pages = small.stats()["kv_pages"]
    assert pages_for(CONTEXT) <= n_pages < SLOTS * pages_for(CONTEXT)
    assert [tokens(g) for g in [small.submit(r) for r in requests]] == [alone(engine, r) for r in requests]
    small.close()


def test_a_context_larger_than_the_memory(card):
    card = own_card(card)
    gc.collect()
    before = dict(card.allocations)     # not free_bytes: a real card has other users
    with pytest.raises(OutOfMemory, match=r"too much\nit would with --ctx"):
        load_tiny(card, ctx=LONGEST_CTX)
    gc.collect()
    assert card.allocations == before


@pytest.mark.parametrize("name, value", [("ctx", 0), ("ctx", -5), ("slots", 0), ("chunk", 0), ("chunk", 100)])
def test_options_of_load(name, value):
    with pytest.raises(qengine.RequestError, match=f"{name} must be .*not {value}"):
        load_tiny("emulated", **{name: value})


@pytest.mark.parametrize("value", ["5", 2.5, True])
@pytest.mark.parametrize("name", ["ctx", "slots", "chunk", "kv_tokens", "memory", "expert_memory", "checkpoint_memory",
                                  "checkpoint_host_memory"])
def test_sizes_of_load_are_whole_numbers(name, value):
    with pytest.raises(qengine.RequestError, match=f"^{name} must be a whole number, not {value!r}$"):
        load_tiny("emulated", **{name: value})


def test_a_context_longer_than_the_models_own_is_warned_of(capsys):
    for ctx in 4096, 4097:
        qengine.load(TINY, card="emulated", ctx=ctx).close()
        assert ("warning: the model was made for 4096 tokens" in capsys.readouterr().err) == (ctx > 4096)


def test_an_open_model_is_loaded_as_it_is(card):
    opened = qengine.open_model(TINY)
    engine = qengine.load(opened, card=card, ctx=CONTEXT, progress=False)
    assert engine.config is opened.config and engine.tokenizer is opened.tokenizer
    engine.close()


def test_more_cards_than_layers_are_refused():
    with pytest.raises(qengine.RequestError, match="tiny has 3 layers: 4 cards are too many"):
        load_tiny("emulated:4")


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    gguf = qengine.GGUF(TINY)
    name = "blk.1.ffn_up.weight"
    data = bytearray(Path(TINY).read_bytes())
    at = gguf.tensors[name].offset + 34 * 5
    data[at:at + 2] = np.float16(np.nan).tobytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with pytest.raises(qengine.ModelError, match=f"tensor '{name}' holds a block scale that is not a finite"):
        qengine.load(str(damaged), card="emulated", progress=False)
