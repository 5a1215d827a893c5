"""The prefix cache: who has which page, which states are kept, what a prompt is spared, and that nothing is ever wrong.

First with a made-up model: its keys and values are hashes of all tokens up to a position and of how each of them was
computed, and its states are these tokens themselves. So whatever is reused wrongly shows when it is read. Then with
real ones."""

import functools
import itertools
import json
import math
import random
import re
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

import qengine
from engine.constraints import Constraint, Vocabulary, along
from engine.plan import LEAST_CHECKPOINTS, step_rows
from engine.prefix import CHECKPOINT_INTERVAL, PAGE_TOKENS, PrefixCache, checkpoint_positions, pages_for, whole_pages
from engine.sampler import BUFFERS
from engine.sequence import Sequence
from engine.speculate import Pace
from engine.tokenizer import Tokenizer
from engine.turns import LONGEST_PAUSE, PART, PASS, PROMPT_SHARE
from kernels.advance import DRAFTS, N_DRAFTS
from kernels.card import CardError
from kernels.emulated.card import EmulatedCard
from kernels.records import CHECK_ROWS
from tests.models import load_tiny

# ---- a model that remembers exactly what it was shown ------------------------------------------------------

TURN, EOS = 1, 2
PIECES = ["", qengine.TURN, "<|im_end|>", *'{}[]:," ', "true", *"0123456789abcdefghijklmnopqrstuvwxy", "10", "size"]
VOCABULARY = len(PIECES)
CHUNKS = 64, 128, 512


class Speller(Tokenizer):
    """The longest piece that fits, from left to right."""

    def __init__(self):
        super().__init__([piece.encode() for piece in PIECES], {qengine.TURN: TURN, "<|im_end|>": EOS}, {}, [EOS])
        self.pattern = re.compile("|".join(sorted(map(re.escape, PIECES[3:]), key=len, reverse=True)))

    def _encode_plain(self, texts):
        return [[PIECES.index(piece) for piece in self.pattern.findall(text)] for text in texts]


TOKENIZER = Speller()
WORDS = Vocabulary(TOKENIZER)
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SCHEMAS = [
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 60},
    {"type": "object", "properties": {"size": {"enum": ["large", "small"]}, "is it so": {"const": [True] * 40},
                                      "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 0}},
     "required": ["size", "is it so"], "additionalProperties": False}]
CHOICE = "large|small|nothing of (that){30} which is here"
GRAMMARS = {LLMatcher.grammar_from_regex(CHOICE): lambda text: bool(re.fullmatch(CHOICE, text))} | {
    LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT):
        lambda text, schema=schema: jsonschema.validate(json.loads(text), schema) is None for schema in SCHEMAS}

ANSWER_NAMES = "token", "slot", "position", "end", "accepted"  # columns of an answer before its drafts
EMPTY = 0, 0        # what is known of a text: a hash of its tokens, and one of how they were computed, too


def extended(known, token, is_decoded=False):
    """What is known of a text that has one token more, a prompt's or one that was decoded."""
    return hash((known[0], token)), hash((known[1], token, is_decoded))


def after(steps, known=EMPTY):
    """What is known after (token, whether it was decoded), ..."""
    return functools.reduce(lambda known, step: extended(known, *step), steps, known)


def following(known, allowed=None):
    """The next token of a text, which depends on all of it, but not on how it was computed: rounding seldom shows."""
    allowed = range(VOCABULARY) if allowed is None else allowed
    return allowed[known[0] % len(allowed)]


def allowed_by(constraint):
    """The tokens that a constraint allows; None: all."""
    if constraint.forced:
        return [constraint.forced[0]]
    if constraint.matcher is None:
        return None
    mask = np.frombuffer(constraint.matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCABULARY]).tolist()


class Timetable:
    """When a card has done each step, and each part of a pass, as engine/micro_batches.py orders them.

    rates: how fast a step and the part beside it get on while both run, of their own speeds; None: they take turns.
    """

    def __init__(self):
        self.rates, self.ends = None, []            # ends: of the steps
        self.step = None                            # the last step, while its end is not known: (begin, end if alone)
        self.steps_end = self.part_end = self.before = 0.0      # before: no later part begins before this

    @property
    def busy_until(self):
        """When all is done, if nothing else is queued."""
        return max(self.steps_end, self.part_end, self.step[1] if self.step else 0.0)

    def add_step(self, now, seconds):
        self._end_step()
        begin = max(now, self.busy_until)
        self.step = begin, begin + seconds

    def end_of(self, number):
        """Of a step, if nothing else is queued."""
        return self.ends[number] if number < len(self.ends) else self.step[1]

    def add_part(self, now, seconds, is_first):
        if is_first or not self.rates:
            self._end_step()
            self.before = self.busy_until
        begin = max(now, self.before, self.part_end)
        self.part_end = begin + seconds
        if self.step and max(begin, self.step[0]) < min(self.part_end, self.step[1]):
            both = max(begin, self.step[0])         # from here on both run, until one of them is done
            left = self.step[1] - both, self.part_end - both
            taken = min(each / rate if rate else math.inf for each, rate in zip(left, self.rates))
            step_end, self.part_end = (both + taken + each - taken * rate for each, rate in zip(left, self.rates))
            self.step = self.step[0], step_end
        self._end_step()
        self.before = self.steps_end
        return self.part_end - begin

    def _end_step(self):
        """What is queued from now on does not change the end of the last step."""
        if self.step:
            self.steps_end = self.step[1]
            self.ends.append(self.steps_end)
            self.step = None


class FakePipeline:
    """Does at once what a Pipeline queues, and checks whatever it reads."""

    def __init__(self, n_slots, n_pages, n_numbers, n_hosts, random, n_groups):
        self.pages = [[None] * PAGE_TOKENS for _ in range(n_pages)]
        self.tables, self.masks = [[] for _ in range(n_slots)], [{}] * n_slots      # of slots: pages, allowed tokens,
        self.states, self.known = [None] * n_slots, [None] * n_slots    # steps seen, what was known after each
        self.targets, self.last = [None] * n_slots, SimpleNamespace(step_rows=step_rows(n_slots, N_DRAFTS))
        self.n_checked = self.n_accepted = 0        # drafts
        self.saved, self.hosts = [None] * n_numbers, [None] * n_hosts
        self.n_stages, self.n_groups, self.batches = n_groups, n_groups, {}
        self.stages = [SimpleNamespace(state_bytes=1, store=None)] * n_groups
        self.now, self.token_seconds, self.step_seconds = 0.0, 0.0004, 0.002    # the host's clock, and costs
        self.times = Timetable()
        self.random, self.fault, self.n_processed = random, None, 0
        self.log, self.passes = [], []              # passes: the first two tokens of each
        self.n_layers, self.plan_error = 32, 1.0    # of a pass; what plans say of its time, as a multiple
        self.growth = 0.0                           # and of what they do not know: each token before it slows a pass
        self.gallery = None                         # no model here sees
        self.unfinished = None                      # a pass of which layers are left: (how many, ids, slot, marks)

    def prepare_slot(self, slot, request, number, lag):
        self.states[slot] = [] if number is None else list(self.saved[number])
        assert [token for token, _ in self.states[slot]] == request.prompt_ids[:len(self.states[slot])]
        self.known[slot] = list(itertools.accumulate(self.states[slot], lambda known, step: extended(known, *step),
                                                     initial=EMPTY))[1:]
        self.masks[slot] = {}
        self.log.append(("prepare", request))

    def set_pages(self, slot, pages):
        self.tables[slot] = list(pages)

    def save(self, slot, number):
        self.saved[number] = tuple(self.states[slot])

    def aim(self, slot, number):
        self.targets[slot] = number

    def spill(self, number, host):
        if self.random.random() < 0.01:
            return False                            # no more memory to be had
        self.hosts[host], self.saved[number] = self.saved[number], None
        return True

    def fetch(self, host, number):
        self.saved[number], self.hosts[host] = self.hosts[host], None

    def pass_rows(self, start, end, limit, last, is_sparse=False):
        return min(end - start, limit)

    def piece_seconds(self, rows, start, is_sparse=False):
        n = self.n_layers if self.n_stages == 1 else 1
        return [self.plan_error * self.token_seconds * rows / n] * n

    def prefill(self, ids, slot, start, marks=(), n_pieces=None, seen=None, is_sparse=False):
        assert start % PAGE_TOKENS == 0 and len(self.states[slot]) == start
        assert n_pieces is None or self.n_stages == 1
        is_whole = n_pieces is None
        self.n_processed += len(ids)
        self.log.append(("prefill", len(ids)))
        self.passes.append(tuple(ids[:2]))
        for at in range(start, start + len(ids)):           # layers have written something there, others not yet
            self.pages[self.tables[slot][at // PAGE_TOKENS]][at % PAGE_TOKENS] = "unfinished"
        for number in dict(marks).values():
            self.saved[number] = "unfinished"
        self.unfinished = self.n_layers, list(ids), slot, dict(marks)
        span = self.continue_prefill(n_pieces, is_first=True)
        return None if is_whole and self.n_stages > 1 else span

    def continue_prefill(self, n_pieces=None, is_first=False):
        left, ids, slot, marks = self.unfinished
        assert n_pieces is None or 0 < n_pieces < left
        of_token = self.token_seconds * (1 + self.growth * len(self.states[slot]))
        seconds = self.times.add_part(self.now, of_token * len(ids) * (n_pieces or left) / self.n_layers, is_first)
        timed = SimpleNamespace(seconds=seconds, end=self.times.part_end)
        span = SimpleNamespace(result=lambda: timed, worker=SimpleNamespace(wait=self.wait))
        self.log.append(("part", len(ids) * (n_pieces or left) / self.n_layers))
        if n_pieces:
            self.unfinished = left - n_pieces, ids, slot, marks
            return span
        self.unfinished = None
        for n, token in enumerate(ids, 1):
            self.see(slot, token, is_decoded=False)
            if n in marks:
                assert n % PAGE_TOKENS == 0
                self.save(slot, marks[n])
        self.check_pages(slot)
        return span

    def wait(self, end):
        self.now = max(self.now, end)

    def see(self, slot, token, is_decoded):
        """A token is processed: what its position holds is written."""
        at, known = len(self.states[slot]), self.known[slot]
        self.states[slot].append((token, is_decoded))
        known.append(extended(known[-1] if at else EMPTY, token, is_decoded))
        self.pages[self.tables[slot][at // PAGE_TOKENS]][at % PAGE_TOKENS] = known[at]

    def check_pages(self, slot):
        """All that attention reads is what this very slot has computed, or would have, bit for bit. (Of each page the
        last position stands for all.)"""
        known = self.known[slot]
        for at in {*range(PAGE_TOKENS - 1, len(known), PAGE_TOKENS), len(known) - 1}:
            page = self.pages[self.tables[slot][at // PAGE_TOKENS]]
            assert page[at % PAGE_TOKENS] == known[at], f"slot {slot} reads a wrong page at {at}"

    def tokens(self, chosen):
        """Tokens that the host can read when the card has done what is queued now: a step, or the end of a pass."""
        number, done_at = len(self.times.ends), self.times.busy_until
        is_step = self.times.step is not None

        def read():
            self.now = max(self.now, self.times.end_of(number) if is_step else done_at)
            return np.array(chosen)

        return SimpleNamespace(read=read)

    def constrain(self, constraints, drafts, width):
        self.masks = [{} if slot in drafts else masks for slot, masks in enumerate(self.masks)]
        for slot, constraint in constraints.items():
            assert len(drafts[slot]) < width
            self.masks[slot] = dict(enumerate(map(allowed_by, along(constraint, drafts[slot]))))

    def sample_row(self, row, answer, n_drafts, log_probs):
        answer = dict(zip(ANSWER_NAMES, answer))
        return self.outcomes([answer], [[answer["position"]]], n_drafts)

    def outcomes(self, answers, rows, n_drafts):
        """What is chosen after the rows of each answer, up to the first draft that differs, and the next drafts."""
        found = []
        for answer, known in zip(answers, rows):
            slot, tokens = answer["slot"], []
            for j, at in enumerate(known):
                tokens.append(following(self.known[slot][at], self.masks[slot].get(j)))
                if j + 1 < len(known) and answer["drafts"][j] != tokens[-1]:
                    break
            self.n_checked, self.n_accepted = self.n_checked + max(len(known) - 1, 0), self.n_accepted + len(tokens[1:])
            answer["drafts"] = self.guesses(slot, known[0] + 1, tokens, n_drafts) if tokens else []
            found.append([len(tokens), *tokens, *[0] * (CHECK_ROWS - len(tokens)), *answer["drafts"],
                          *[-1] * (N_DRAFTS - len(answer["drafts"]))])
            if tokens:
                answer.update(token=tokens[-1], position=answer["position"] + len(tokens))
        return self.tokens(found)

    def guesses(self, slot, n_known, tokens, n_drafts):
        """Drafts of what follows: right ones, as far as no grammar rules, until one is wrong."""
        known, drafts = self.known[slot][n_known - 1], []
        for token in tokens:
            known = extended(known, token)
        for _ in range(self.random.randint(0, n_drafts)):
            drafts.append(following(known) if self.random.random() < 0.8 else self.random.randrange(VOCABULARY))
            known = extended(known, drafts[-1])
        return drafts

    def place(self, answers, group):
        self.batches[group] = [dict(zip(ANSWER_NAMES, answer)) | {"drafts": answer[DRAFTS:]}
                               for answer in answers]

    def catch_up(self, answers, group):
        self.place(answers, group)
        self.begin(group, len(answers))

    def begin(self, group, n):
        for answer in self.batches[group][:n]:
            slot, position = answer["slot"], answer["position"]
            del self.states[slot][position:], self.known[slot][position:]
            if position % PAGE_TOKENS == 0 and self.targets[slot] is not None:
                self.save(slot, self.targets[slot])

    def settle(self):
        pass

    def forward(self, shape, group):
        self.times.add_step(self.now, self.step_seconds)
        self.log.append(("step", shape.n))
        self.begin(group, shape.n)
        self.rows = []
        for answer in self.batches[group][:shape.n]:
            slot, position = answer["slot"], answer["position"]
            assert len(self.states[slot]) == position
            end = min(position // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS, answer["end"] - 1)
            drafts = itertools.takewhile(lambda draft: draft >= 0, answer["drafts"][:shape.width - 1])
            tokens = [answer["token"], *drafts][:max(end - position, 0)]
            for token in tokens:
                self.see(slot, token, is_decoded=True)
                self.check_pages(slot)
            self.rows.append(range(position, position + len(tokens)))

    def choose(self, shape, group):
        return self.outcomes(self.batches[group][:shape.n], self.rows, shape.n_drafts)

    def step(self, shape, group):
        self.forward(shape, group)
        return self.choose(shape, group)


class AnyPace(Pace):
    """Checks of a given width, or of any."""

    def __init__(self, random, width):
        super().__init__(has_block=random.random() < 0.5)
        self.random, self.given = random, width

    def width(self, answers):
        return self.given or self.random.randint(1, CHECK_ROWS)


class World:
    """A scheduler without its thread, on a fake pipeline."""

    def __init__(self, seed, n_slots=2, n_ctx=640, n_pages=20, n_numbers=4, n_hosts=2, chunk=128,
                 n_groups=1, width=None):
        self.random = random.Random(seed)
        self.pipeline = FakePipeline(n_slots, n_pages, n_numbers, n_hosts, self.random, n_groups)
        self.cache = PrefixCache(self.pipeline, n_pages, n_numbers, n_hosts)
        self.scheduler = qengine.Scheduler(self.pipeline, self.cache, TOKENIZER, n_slots, n_ctx, chunk,
                                           AnyPace(self.random, width))
        self.scheduler.turns.clock = lambda: self.pipeline.now
        self.n_ctx, self.n_slots, self.n_pages, self.n_numbers, self.n_hosts = (
            n_ctx, n_slots, n_pages, n_numbers, n_hosts)
        self.checks_every_step = True
        self.admitted = []      # generations in the order in which they got slots, without those that ended at once

    def submit(self, tokens, **fields):
        request = qengine.Request(list(tokens), **fields)
        generation = qengine.Generation(request, TOKENIZER, constraint_of(request))
        self.scheduler.submit(generation)
        return generation

    def step(self):
        self.scheduler.run_round()
        self.admitted += [s.generation for s in self.scheduler.running if s.generation not in self.admitted]
        if self.checks_every_step:
            self.check()

    def finish(self, *generations):
        for _ in range(100_000):
            if all(g._done.is_set() for g in generations):
                return self.check()
            self.step()
        raise AssertionError("they never end")

    def answer(self, tokens, **fields):
        """(the answer's tokens, tokens of the prompt that were processed)."""
        before, generation = self.pipeline.n_processed, self.submit(tokens, **fields)
        self.finish(generation)
        return tokens_of(generation), self.pipeline.n_processed - before

    # ---- what must hold after every step ----

    def nodes(self):
        """(node, its text as steps, what is known after it) of the whole tree."""
        found, ahead = [], [(self.cache.roots[0], (), EMPTY)]
        while ahead:
            node, steps, known = ahead.pop()
            for key, alike in node.children.items():
                assert alike and len(key) == PAGE_TOKENS
                for n_prompt, child in alike.items():
                    assert (child.parent, child.tokens, child.n_prompt) == (node, key, n_prompt)
                    assert child.depth == node.depth + 1
                    own = tuple((token, at >= n_prompt) for at, token in enumerate(key))
                    found.append((child, steps + own, after(own, known)))
                    assert child.n_decoded == sum(is_decoded for _, is_decoded in found[-1][1])
                    ahead.append(found[-1])
        return found

    def check(self):
        cache, running, nodes = self.cache, self.scheduler.running, self.nodes()
        own = [page for s in running for page in s.pages[s.node.depth:]]
        assert sorted(cache.free_pages + [node.page for node, *_ in nodes] + own) == list(range(self.n_pages))
        assert cache.n_idle == sum(not node.n_users for node, *_ in nodes)
        paths = [set(s.node.path()) for s in running]
        numbers = cache.free_numbers + [s.target for s in running if s.target is not None]
        if self.scheduler.progress:
            numbers += [number for _, number in self.scheduler.progress.marks]
        hosts = list(cache.free_hosts)
        for node, steps, known in nodes:
            assert node.n_users == sum(node in path for path in paths)
            assert node.children or node.n_users or node.is_kept, "a page that nobody can use"
            assert self.pipeline.pages[node.page][-1] == known
            assert (node in cache.on_card) == (node.number is not None)
            assert (node in cache.in_host) == (node.host is not None)
            if node.number is not None:
                assert node.host is None and self.pipeline.saved[node.number] == steps
                numbers.append(node.number)
            elif node.host is not None:
                assert self.pipeline.hosts[node.host] == steps
                hosts.append(node.host)
            if node.is_kept:
                above = next((each.depth for each in node.parent.path() if each.is_kept), 0)
                assert node.rank[0] == PAGE_TOKENS * (node.depth - above) + node.floor and node.floor <= cache.floor
        assert {*cache.on_card, *cache.in_host} <= {node for node, *_ in nodes}
        for order in cache.on_card, cache.in_host:
            ranks = [node.rank for node in order]
            assert ranks == sorted(set(ranks))
        assert sorted(numbers) == list(range(self.n_numbers))
        assert len(set(hosts)) == len(hosts) and set(hosts) <= set(range(self.n_hosts))
        for sequence in running:
            path = [node.page for node in sequence.node.path()]
            assert sequence.pages[:sequence.node.depth] == path[::-1]
            assert len(sequence.pages) <= sequence.n_pages
        assert self.scheduler._unpromised_pages() >= 0, "a promise that cannot be kept"
        assert sorted(self.scheduler.free_slots + [s.slot for s in running]) == list(range(self.n_slots))


def constraint_of(request):
    return request.grammar and Constraint(WORDS, request.grammar, request.grammar_after)


def truth(request, n_ctx):
    """The answer to a request made alone."""
    known, answer = after((token, False) for token in request.prompt_ids), []
    constraint = constraint_of(request)
    while True:
        answer.append(following(known, constraint and allowed_by(constraint)))
        known = extended(known, answer[-1])
        if constraint:
            constraint.take(answer[-1])
        if (constraint and constraint.ended or answer[-1] == EOS and not request.ignore_eos
                or len(answer) == request.max_tokens or len(request.prompt_ids) + len(answer) >= n_ctx):
            return answer


def deltas_of(generation):
    """What has come of an answer when it is over; it can be asked for again."""
    if "deltas" not in generation.__dict__:
        generation.deltas = list(generation)
    return generation.deltas


def tokens_of(generation):
    return [delta.token_id for delta in deltas_of(generation)]


class Talkers:
    """Makes prompts as people do: new ones, next turns, edited ones, the same again; and with answers in them that are
    not yet given."""

    def __init__(self, random, n_ctx):
        self.random, self.n_ctx = random, n_ctx
        self.systems = [self.turn(random.choice((3, 64, 100, 200))) for _ in range(3)]
        self.known = []                             # requests

    def turn(self, n):
        return [TURN, *(self.random.randrange(3, VOCABULARY) for _ in range(n))]

    def prompt(self):
        kind = self.random.random()
        if not self.known or kind < 0.2:
            tokens = self.random.choice(self.systems) + self.turn(self.random.randrange(1, 150))
        elif kind < 0.3:
            tokens = [self.random.randrange(3, VOCABULARY) for _ in range(self.random.randrange(1, 400))]
        else:
            request = self.random.choice(self.known)
            prompt, answer = request.prompt_ids, truth(request, self.n_ctx)
            if kind < 0.4:
                tokens = prompt
            elif kind < 0.5:
                tokens = prompt[:self.random.randrange(1, len(prompt) + 1)] + self.turn(5)
            elif kind < 0.7:                         # the answer so far, or further, to be continued
                tokens = prompt + answer[:self.random.randrange(len(answer) + 1)]
            else:                                    # the next turn, with all of the answer or what the template left
                tokens = prompt + answer[self.random.choice((0, 0, 7)):] + self.turn(self.random.randrange(1, 100))
        return tokens[:self.n_ctx - 1]

    def request(self):
        """Some with a grammar, and some of those with one that begins to rule on the way."""
        fields = {"max_tokens": self.random.choice((None, 1, 5, 80, 300))}
        if self.random.random() < 0.3:
            fields |= {"grammar": self.random.choice(list(GRAMMARS)),
                       "grammar_after": self.random.choice((None, None, TURN))}
        tokens = self.prompt()
        self.known = [*self.known, qengine.Request(tokens, **fields)][-8:]
        return tokens, fields


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 400))])
def test_anything_that_may_happen(seed):
    """Random arrivals, ends, cancellations and guests, with next to no memory: every answer is that of the request
    alone and obeys its grammar, nobody is overtaken, and after every step all is where it should be."""
    choice = random.Random(seed)
    n_slots, n_ctx = choice.randrange(1, 5), choice.choice((192, 640))
    fewest = pages_for(n_ctx)
    world = World(seed, n_slots, n_ctx, choice.randrange(fewest, 3 * fewest), choice.randrange(1, 7),
                  choice.randrange(0, 5), choice.choice(CHUNKS), choice.randint(1, n_slots))
    talkers, generations = Talkers(choice, n_ctx), []
    for _ in range(600):
        draw = choice.random()
        if draw < 0.15:
            tokens, fields = talkers.request()
            generations.append(world.submit(tokens, **fields))
        elif draw < 0.18 and generations:
            choice.choice(generations[-8:]).cancel()
        elif draw < 0.185:
            world.cache.clear()
            world.check()
        elif draw < 0.2:
            n_tokens = choice.randrange(1, n_ctx)
            try:
                with world.scheduler.borrow_slot(n_tokens):
                    pass
            except qengine.RequestError:
                assert not world.scheduler.free_slots or world.scheduler._unpromised_pages() < fewest
            world.check()
        world.step()
    generations += [world.submit([TURN, 3], grammar=grammar) for grammar in GRAMMARS]
    world.finish(*generations)
    for generation in generations:
        got, want = tokens_of(generation), truth(generation.request, n_ctx)
        assert got == (want[:len(got)] if generation.cancelled else want)
    ruled = [g for g in generations if g.request.grammar and not g.request.grammar_after and g.finish_reason == "stop"]
    for generation in ruled:
        assert GRAMMARS[generation.request.grammar]("".join(delta.text for delta in deltas_of(generation)))
    assert ruled
    assert world.admitted == [g for g in generations if g in world.admitted], "somebody was overtaken"
    stats = world.scheduler.stats()
    assert stats["requests_running"] == stats["requests_waiting"] == stats["kv_pages_used"] == 0
    assert stats["kv_pages_cached"] + stats["kv_pages_free"] == stats["kv_pages"]
    world.cache.clear()
    assert len(world.cache.free_pages) == world.n_pages and not world.cache.roots[0].children


# ---- what a prompt is spared -------------------------------------------------------------------------------


def texts(seed=0):
    """Texts of which no two have anything in common: text(n tokens)."""
    numbers = random.Random(seed)
    return lambda n: [numbers.randrange(3, 10**6) for _ in range(n)]


def roomy(**sizes):
    """A world with plenty of everything; checked when answers are complete."""
    plenty = {"n_slots": 4, "n_ctx": 8192, "n_pages": 600, "n_numbers": 100, "n_hosts": 0, "chunk": 512}
    world = World(0, **plenty | sizes)
    world.checks_every_step = False
    return world


def common(tokens, others):
    """The length of the longest beginning that `tokens` shares with one of the others."""
    return max((next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other)))
                for other in others), default=0)


@pytest.mark.parametrize("kept_of_answer", [0, 11, None], ids=["nothing", "without thoughts", "all"])
@pytest.mark.parametrize("turn_tokens", [5, 70, 400])
def test_every_turn_processes_what_is_new(kept_of_answer, turn_tokens):
    """Twelve turns, each asked once more, and once with its question edited at the end. At most 64 tokens beside the
    new ones are processed, but all tokens of an edited question."""
    world, text, known = roomy(), texts(), []
    history = [TURN, *text(150)]
    for _ in range(12):
        question = [TURN, *text(turn_tokens)]
        edited = [*question[:-3], *text(3)]
        for asked in question, question, edited, question:
            prompt = [*history, *asked, TURN, 3, 4]
            answer, n_processed = world.answer(prompt, max_tokens=100, ignore_eos=True)
            known_tokens = min(common(prompt, known), len(history) if asked is edited else len(prompt))
            assert 1 <= n_processed <= len(prompt) - known_tokens + PAGE_TOKENS
            known += [prompt, prompt + answer[:-1]]
        kept = [] if kept_of_answer == 0 else answer[-kept_of_answer:] if kept_of_answer else answer
        history = [*prompt, *kept]
    assert world.scheduler.stats()["cached_tokens"] > 0.5 * world.scheduler.stats()["prompt_tokens"]


def test_prompts_that_arrive_together_share_their_beginning():
    world, text = roomy(n_slots=3), texts()
    system = [TURN, *text(700)]
    world.finish(*[world.submit([*system, TURN, *text(90)], max_tokens=5) for _ in range(8)])
    assert world.pipeline.n_processed <= len(system) + 8 * (91 + PAGE_TOKENS)


def test_a_long_text_is_processed_again_from_the_last_interval_on():
    """And where it was left once already, from there."""
    world, text = roomy(), texts()
    document = text(5000)
    world.answer(document, max_tokens=1)
    for n_shared in 4000, 1500, 60:
        other, again = [*document[:n_shared], *text(100)], [*document[:n_shared], *text(100)]
        assert world.answer(other, max_tokens=1)[1] <= 100 + CHECKPOINT_INTERVAL
        assert world.answer(again, max_tokens=1)[1] <= 100 + PAGE_TOKENS


def test_the_last_token_is_always_processed():
    world, text = roomy(), texts()
    for n in 64, 128, 65:
        prompt = text(n)
        first, _ = world.answer(prompt, max_tokens=3, ignore_eos=True)
        again, n_processed = world.answer(prompt, max_tokens=3, ignore_eos=True)
        assert again == first and n_processed == (n - 1) % PAGE_TOKENS + 1
    assert world.answer(prompt[:64], max_tokens=1)[1] == 64     # although the states after those are there


def test_a_cancelled_prompt_leaves_what_was_done():
    world, text = roomy(), texts()
    prompt = text(3000)
    generation = world.submit(prompt)
    while generation.n_read < 4 * 512:
        world.step()
    generation.cancel()
    world.finish(generation)
    assert world.pipeline.n_processed == 4 * 512
    assert world.answer(prompt, max_tokens=1)[1] == 3000 - 2 * CHECKPOINT_INTERVAL


def test_an_answer_has_one_checkpoint_and_those_at_intervals():
    world, text = roomy(), texts()
    generation = world.submit(text(100), max_tokens=1500, ignore_eos=True)
    while not generation.n_generated == 1450:
        world.step()
    assert sorted(node.depth * PAGE_TOKENS for node in world.cache.on_card) == [64, 1024, 1536]


def test_an_answer_that_is_given_again_leaves_the_checkpoint_of_the_first():
    """Although it is longer: the next turn after the first one processes what is new."""
    world, text = roomy(), texts()
    prompt = text(100)
    first, _ = world.answer(prompt, max_tokens=170, ignore_eos=True)
    again, _ = world.answer(prompt, max_tokens=300, ignore_eos=True)
    assert again[:170] == first
    for answer in first, again:
        assert world.answer([*prompt, *answer, *text(20)], max_tokens=1)[1] <= 20 + PAGE_TOKENS


@pytest.mark.parametrize("lengths", [(300, 170), (170, 300), (1000, 900), (300, 290)])
def test_answers_with_the_same_tokens_share_their_checkpoints(lengths):
    """The next turn after each processes what is new, and what they had on the way is not kept twice."""
    world, text = roomy(), texts()
    prompt = text(100)
    twins = [world.submit(prompt, max_tokens=n, ignore_eos=True) for n in lengths]
    world.finish(*twins)
    ends, intervals = [whole_pages(100 + n - 1) for n in lengths], CHECKPOINT_INTERVAL
    assert {node.depth * PAGE_TOKENS for node in world.cache.on_card} == {
        64, *ends, *range(intervals, max(ends), intervals)}
    for twin in twins:
        assert world.answer([*prompt, *tokens_of(twin), *text(20)], max_tokens=1)[1] <= 20 + PAGE_TOKENS


def test_positions_of_checkpoints():
    turns = [0, 150, 300, 310, 700, 1000, 1040, 3000, 3200]      # the first is the system prompt
    tokens = [TURN if at in turns else 3 for at in range(3300)]
    every = [128, 640, 960, 1280 - 256, 2048, 2944, 3200, 3264]
    assert checkpoint_positions(tokens, TURN, 0, 0) == sorted({*every} - {1024} | {128})
    assert checkpoint_positions(tokens, TURN, 2048, 2112) == [2112, 2944, 3200, 3264]
    assert checkpoint_positions(tokens, None, 0, 0) == [1024, 2048, 3072, 3264]
    assert checkpoint_positions([3] * 64, None, 0, 0) == []


# ---- what goes first ---------------------------------------------------------------------------------------


def test_the_least_worthy_goes_first():
    """There is room for two checkpoints on the card and one in host memory. Of four texts of these lengths, the one is
    lost that would take the least time to process again; each use makes a text worth more."""
    world, text = roomy(n_numbers=2, n_hosts=1), texts()
    prompts = [text(n) for n in (65, 321, 129, 193)]

    def is_known(i):
        return world.cache.find(prompts[i][:-1], world.cache.roots[0])[0] is not world.cache.roots[0]

    for prompt in prompts:
        world.answer(prompt, max_tokens=1)
    assert [is_known(i) for i in range(4)] == [False, True, True, True]
    assert world.scheduler.stats()["checkpoints_spilled"] == 2 and world.scheduler.stats()["checkpoints_dropped"] == 1
    for _ in range(10):                     # of no use for ten others
        world.answer(prompts[3], max_tokens=1)
    world.answer(prompts[0], max_tokens=1)
    assert [is_known(i) for i in range(4)] == [True, True, False, True]


def test_what_goes_is_found_at_once():
    """However many checkpoints there are, few are looked at."""
    cache = PrefixCache(SimpleNamespace(spill=lambda *_: True), 3000, 1000, 1000)
    for text in range(2500):
        page, = cache.take_pages(1)
        node, before = cache.grow(cache.roots[0], (text,), PAGE_TOKENS, page), cache.n_ranked
        cache.keep(node, cache.take_number())
        cache.leave(SimpleNamespace(node=node, pages=[page], target=None))
        assert cache.n_ranked - before == 1
    assert (len(cache.on_card), len(cache.in_host), cache.n_dropped) == (1000, 1000, 500)


def test_pages_are_taken_from_what_nobody_uses():
    world, text = roomy(n_ctx=640, n_pages=20, n_slots=2), texts()
    world.answer(old := text(500), max_tokens=1)
    running = world.submit(text(300), max_tokens=300, ignore_eos=True)
    for _ in range(100):
        world.step()
    assert world.cache.find(old, world.cache.roots[0])[0].depth == 7
    other = world.submit(text(300), max_tokens=340, ignore_eos=True)
    while not world.scheduler.stats()["checkpoints_dropped"]:
        world.step()
    assert world.cache.find(old, world.cache.roots[0])[0] is world.cache.roots[0]
    decoded = [sequence.decoded for sequence in world.scheduler.running if sequence.decoded]
    assert decoded and all(node.is_kept for node in decoded)
    world.finish(running, other)
    assert tokens_of(running) == truth(running.request, 640)


def test_what_runs_keeps_its_pages_when_its_checkpoints_go():
    world, text = roomy(n_numbers=1), texts()
    prompt = text(300)
    world.answer(prompt, max_tokens=1)
    running = world.submit([*prompt, *text(5)], max_tokens=30, ignore_eos=True)
    world.step()
    world.cache.clear()
    world.finish(running)
    assert tokens_of(running) == truth(running.request, 8192)


# ---- who is served when ------------------------------------------------------------------------------------


def test_a_running_answer_waits_for_a_part_of_a_pass_at_most():
    """Alone, a prompt has long parts. Beside an answer it has short ones, and a step between any two of them."""
    world, text = roomy(chunk=2048), texts()
    first = world.submit(text(4096), max_tokens=4000, ignore_eos=True)
    while not first.n_generated:
        world.step()
    assert [n for kind, n in world.pipeline.log if kind == "prefill"] == [2048] * 2
    parts = [n for kind, n in world.pipeline.log if kind == "part"]
    assert parts[:2] == [64, 64] and sum(parts) == 4096 and set(parts[2:]) <= {448, 512}    # of 512 in 0.2 s
    assert world.pipeline.log[-1] == ("step", 1)
    while first.n_generated < 10:
        world.step()
    del world.pipeline.log[:]
    world.finish(world.submit(text(4096), max_tokens=1))
    kinds = [kind for kind, _ in world.pipeline.log if kind in ("part", "step")]
    assert "part part" not in " ".join(kinds)
    passes = [n for kind, n in world.pipeline.log if kind == "prefill"]
    longest = max(n for kind, n in world.pipeline.log if kind == "part") * world.pipeline.token_seconds
    assert longest <= PART + world.pipeline.piece_seconds(max(passes), 0)[0]
    assert sum(passes) == 4096 and max(passes) == PASS / world.pipeline.token_seconds // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("growth", [0, 0.0005])
@pytest.mark.parametrize("plan_error", [0.1, 1, 8])
@pytest.mark.parametrize("token_seconds", [0.00005, 0.0004, 0.02])
def test_a_cancelled_prompt_frees_the_card_soon(token_seconds, plan_error, growth):
    """However long its passes would be, and however wrong the plan, from its second pass on; also where a plan does
    not know how much slower passes become towards the end of a long prompt."""
    world, text = roomy(chunk=2048), texts()
    pipeline, waits = world.pipeline, []
    pipeline.token_seconds, pipeline.plan_error, pipeline.growth = token_seconds, plan_error, growth
    generation = world.submit(text(15_000))
    while generation.n_read < 12_000:
        world.step()
        if len(pipeline.passes) > 1:
            waits.append(pipeline.times.busy_until - pipeline.now)
    assert max(waits) < 0.7
    assert min(waits) >= min(0.1, 64 * token_seconds / pipeline.n_layers)       # the card never waits for the host
    generation.cancel()
    world.step()
    assert generation._done.is_set() and pipeline.n_processed < 15_000


def beside_answers(world, lengths, n_answers=1):
    """What the card does while prompts of these lengths are computed beside answers: (share of the time that passes
    get, seconds of each pause between two steps, tokens of each pass)."""
    text, pipeline = texts(), world.pipeline
    answers = [world.submit(text(10), max_tokens=16_000, ignore_eos=True) for _ in range(n_answers)]
    while not all(answer.n_generated > 5 for answer in answers):
        world.step()
    del pipeline.log[:]
    begin, n_ended = pipeline.now, len(pipeline.times.ends)
    world.finish(*(world.submit(text(n), max_tokens=1) for n in lengths))
    passes = [n for kind, n in pipeline.log if kind == "prefill"]
    share = sum(passes) * pipeline.token_seconds / (pipeline.now - begin)
    return share, np.diff(pipeline.times.ends[n_ended - 1:]), passes


@pytest.mark.parametrize("plan_error", [1.0, 0.2, 5.0])
@pytest.mark.parametrize("token_seconds, step_seconds", [
    (0.00014, 0.0045), (0.0004, 0.002), (0.001, 0.1), (0.00005, 0.02), (0.01, 0.03), (0.0001, 0.0002)])
def test_answers_keep_their_share_of_the_time(token_seconds, step_seconds, plan_error):
    """However long passes and steps take, and whatever plans say of that: prompts get their share of the time. Answers
    pause for no longer than this share and PART ask for, plus half a layer. The first case is like an H100 with a model
    of 9B and 8 answers, the one before the last like a slow card."""
    world = roomy(n_slots=6, n_ctx=16_384, n_pages=1600, width=1, chunk=4096)
    pipeline = world.pipeline
    pipeline.token_seconds, pipeline.step_seconds, pipeline.plan_error = token_seconds, step_seconds, plan_error
    share, pauses, passes = beside_answers(world, [8000, 3000, 3000])
    assert share == pytest.approx(PROMPT_SHARE, abs=0.06)
    a_layer = token_seconds * max(passes) / pipeline.n_layers
    part = max(PART, 1.5 * PROMPT_SHARE / (1 - PROMPT_SHARE) * step_seconds) + a_layer / 2
    assert pauses.max() <= step_seconds + max(part, a_layer) + 1e-9
    if step_seconds == 0.0045:
        assert pauses.max() < 0.04


@pytest.mark.parametrize("plan_error", [1.0, 0.2, 5.0])
@pytest.mark.parametrize("rates, least_share, longest_pause", [
    ((1.0, 1.0), 0.92, 0.04), ((0.5, 0.9), 0.88, 0.04),
    ((0.0, 1.0), 0.78, 0.06), ((0.2, 0.8), 0.75, 0.06), ((0.3, 0.6), 0.69, 0.06)])     # nothing is gained, or lost
def test_steps_beside_parts(rates, least_share, longest_pause, plan_error):
    """Like an H100 with a model of 9B and 8 answers, by how fast a step and a part get on while both run."""
    world = roomy(n_slots=6, n_ctx=24_576, n_pages=2400, width=1, chunk=4096)
    pipeline = world.pipeline
    pipeline.token_seconds, pipeline.step_seconds, pipeline.plan_error = 0.00014, 0.0045, plan_error
    pipeline.times.rates = rates
    share, pauses, _ = beside_answers(world, [18_400])
    assert share > least_share and pauses.max() < longest_pause and np.median(pauses) < 0.03


@pytest.mark.parametrize("width", [1, 3])
def test_steps_that_had_to_be_recorded_are_not_measured(width):
    """A recording takes longer than many a step, and each result buffer has its own. With such times, a width that is
    seldom tried would stay too slow to be tried again."""
    world = roomy(width=width)
    measured, scheduler = [], world.scheduler
    scheduler.pace.measure = lambda n, checked, seconds: measured.append((scheduler.n_steps[0], checked))
    world.answer(texts()(100), max_tokens=60, ignore_eos=True)
    assert len(measured) >= 5 and {checked for _, checked in measured} == {width}
    assert measured[0][0] == BUFFERS + 1
    scheduler.recorded.clear()                          # as if the shape had never been used
    n_measured, n_steps = len(measured), scheduler.n_steps[0]
    world.answer(texts(1)(100), max_tokens=60, ignore_eos=True)
    assert measured[n_measured][0] >= n_steps + BUFFERS


@pytest.mark.parametrize("token_seconds, step_seconds", [(0.0004, 0.002), (0.001, 0.1), (0.01, 0.03)])
def test_answers_on_several_cards_keep_their_share_of_the_time(token_seconds, step_seconds):
    """There passes are whole. They are small enough that an answer pauses for about PASS at most, if that can be."""
    world = roomy(n_slots=6, n_ctx=16_384, n_pages=1600, width=1, chunk=4096, n_groups=3)
    world.pipeline.token_seconds, world.pipeline.step_seconds = token_seconds, step_seconds
    share, pauses, passes = beside_answers(world, [8000, 3000, 3000], n_answers=3)
    assert share == pytest.approx(PROMPT_SHARE, abs=0.06)
    longest = max(PASS, 1.5 * PROMPT_SHARE / (1 - PROMPT_SHARE) * step_seconds, PAGE_TOKENS * token_seconds)
    assert pauses.max() <= longest + step_seconds + 1e-9


def in_parts(world, prompt):
    """Submits a prompt beside an answer, and returns both when some parts of its first pass are queued."""
    answer = world.submit(texts()(10), max_tokens=300, ignore_eos=True)
    while answer.n_generated < 10:
        world.step()
    generation = world.submit(prompt, max_tokens=20, ignore_eos=True)
    while not world.scheduler.progress or not world.scheduler.progress.has_begun:
        world.step()
    world.step()
    return answer, generation


def test_a_prompt_that_is_cancelled_between_the_parts_of_a_pass():
    """No more of the pass is queued, the numbers of its checkpoints are free again, and nothing of it is reused."""
    world, prompt = roomy(chunk=4096, n_numbers=6), texts(1)(600)
    answer, generation = in_parts(world, prompt)
    assert world.scheduler.progress.marks
    generation.cancel()
    del world.pipeline.log[:]
    world.step()
    assert not world.scheduler.progress and all(kind == "step" for kind, _ in world.pipeline.log)
    again = world.submit(prompt, max_tokens=20, ignore_eos=True)
    world.finish(again, answer)
    assert again.n_cached == 0
    assert tokens_of(again) == truth(again.request, 8192) and tokens_of(answer) == truth(answer.request, 8192)


def test_a_pass_is_queued_to_its_end_before_others_use_the_cards():
    """What it keeps in scratch memory between two parts would be lost."""
    world, prompt = roomy(chunk=4096), texts(1)(3000)
    answer, generation = in_parts(world, prompt)
    with world.scheduler.borrow_slot(100):
        assert not world.scheduler.progress and not world.pipeline.unfinished
    world.finish(generation, answer)
    assert tokens_of(generation) == truth(generation.request, 8192)
    assert tokens_of(answer) == truth(answer.request, 8192)


def test_prompts_are_not_starved_by_answers():
    """Answers that never end, one after the other: each prompt gets on."""
    world, text = roomy(n_slots=2), texts()
    prompt, n_answers = world.submit(text(3000), max_tokens=1), 0
    while not prompt._done.is_set():
        world.finish(world.submit(text(5), max_tokens=20, ignore_eos=True))
        n_answers += 1
    assert n_answers < 40


def test_a_process_that_was_suspended_owes_answers_no_hours():
    world, text = roomy(), texts()
    answer = world.submit(text(5), max_tokens=8000, ignore_eos=True)
    while answer.n_generated < 5:
        world.step()
    late = world.submit(text(1000), max_tokens=1)
    while not world.scheduler.turns.unmeasured:
        world.step()
    world.pipeline.now += 36_000
    for _, _, task, _ in world.scheduler.turns.unmeasured:
        task.result = lambda: SimpleNamespace(seconds=36_000.0)
    world.step()
    assert 0 < world.scheduler.turns.owed <= LONGEST_PAUSE
    world.pipeline.step_seconds = 0.1
    world.finish(late)
    assert answer.n_generated < 300


def turns_of(world, *prompts):
    """Which of the prompts got each pass so far, by their first tokens; None: another one."""
    starts = {tuple(prompt[at:at + 2]): i for i, prompt in enumerate(prompts) for at in range(0, len(prompt), 64)}
    return [starts.get(begin) for begin in world.pipeline.passes]


def test_prompts_take_turns():
    """The shortest waits for one pass of another at most, and so does the oldest; equal ones go in their order."""
    world, text = roomy(n_slots=5), texts()
    prompts = [text(n) for n in (4096, 4096, 4096)]
    generations = [world.submit(prompt, max_tokens=1) for prompt in prompts]
    while len(world.pipeline.passes) < 2:
        world.step()
    short, middle = text(20), text(1500)
    generations.append(world.submit(middle, max_tokens=1))
    generations.append(world.submit(short, max_tokens=1))
    world.finish(*generations)
    assert turns_of(world, *prompts, middle, short) == [0, 0, 4, 0, 3, 0, 3, 0, 3, 0, 0, 0, *[1] * 8, *[2] * 8]


def test_the_oldest_prompt_gets_on_while_short_ones_keep_coming():
    world, text = roomy(n_slots=3), texts()
    oldest, n_short = world.submit(text(4096), max_tokens=1), 0
    world.step()
    while not oldest._done.is_set():
        if len(world.scheduler.running) + len(world.scheduler.waiting) < 3:
            world.submit(text(20), max_tokens=1)
            n_short += 1
        world.step()
    assert n_short <= 10
    assert max(len(list(run)) for short, run in itertools.groupby(world.pipeline.log, lambda done: done == (
        "prefill", 20)) if short) == 1


def test_a_prompt_of_which_much_is_kept_counts_as_short():
    world, text = roomy(), texts()
    history = text(3000)
    world.answer(history, max_tokens=1)
    del world.pipeline.passes[:]
    long, again = text(2000), [*history, *text(30)]
    generations = [world.submit(prompt, max_tokens=1) for prompt in (long, again)]
    world.finish(*generations)
    assert turns_of(world, long, again) == [1, 0, 0, 0, 0]


def test_prompts_that_arrive_together_share_whatever_their_lengths():
    """Shorter and longer ones, in any order, with others between: what they have in common is computed once."""
    for seed in range(20):
        world, text, choice = roomy(n_slots=6), texts(seed), random.Random(seed)
        system, others = [TURN, *text(1500)], 3
        tails = [text(choice.randrange(5, 900)) for _ in range(7)]
        asked = [[*system, TURN, *tail] for tail in tails] + [text(choice.randrange(5, 2000)) for _ in range(others)]
        choice.shuffle(asked)
        generations = []
        for prompt in asked:
            generations.append(world.submit(prompt, max_tokens=choice.choice((1, 50)), ignore_eos=True))
            for _ in range(choice.choice((0, 0, 1, 3))):
                world.step()
        world.finish(*generations)
        alone = sum(map(len, asked)) - 7 * len(system)
        assert world.pipeline.n_processed <= len(system) + alone + 10 * PAGE_TOKENS


def test_a_prompt_that_nothing_is_shared_with_waits_for_no_other():
    """A prompt with log-probabilities computes all of its tokens itself, and pages of a whole prompt do not serve a
    sparse one."""
    cache, ids = roomy().cache, texts()(500)
    begun, plain, scored, sparse = (
        Sequence(qengine.Generation(qengine.Request(ids, prompt_logprobs=top), TOKENIZER), slot, 9, cache.roots[tree])
        for slot, (top, tree) in enumerate([(None, False), (None, False), (0, False), (None, True)]))
    assert not plain.follows(begun)
    begun.has_begun = True
    assert plain.follows(begun) and not scored.follows(begun) and not sparse.follows(begun)


def test_nobody_is_overtaken_who_waits_for_pages():
    world, text = roomy(n_ctx=640, n_pages=15), texts()
    running = world.submit(text(100), max_tokens=400, ignore_eos=True)
    world.step()
    large, small = world.submit(text(500), max_tokens=100), world.submit(text(10), max_tokens=10)
    for _ in range(20):
        world.step()
    assert len(world.scheduler.running) == 1 and len(world.scheduler.waiting) == 2
    world.finish(running, large, small)
    assert world.admitted == [running, large, small]


def test_deadlines():
    """While it waits, runs or is a prompt; the others notice nothing."""
    world, text = roomy(n_slots=2), texts()
    other = world.submit(text(10), max_tokens=300, ignore_eos=True)
    late = [world.submit(text(n), timeout=5.0) for n in (10, 3000, 10)]
    while not late[0].n_generated:
        world.step()
    assert not late[1].n_generated
    for generation in late:
        generation.deadline = 0.0
    world.step()
    for generation in late:
        with pytest.raises(qengine.DeadlineExceeded, match="not finished after the 5 s that the request allows"):
            list(generation)
    world.finish(other)
    assert tokens_of(other) == truth(other.request, 8192)
    for timeout in 0, -1.0, float("nan"):
        with pytest.raises(qengine.RequestError, match="timeout"):
            qengine.Request([1], timeout=timeout).check(10, 10)


# ---- with a model ------------------------------------------------------------------------------------------

LONG_TEXT = "느린 카드에서도 문장은 한 글자씩 또박또박 이어진다. The quick brown fox counts its pipes. " * 8


@pytest.fixture
def empty(engine):
    """The engine, which remembers nothing."""
    engine.clear_cache()
    return engine


def drawn(ids, seed=5, **fields):
    fields = {"max_tokens": 12, "temperature": 1.0, "seed": seed, "ignore_eos": True} | fields
    return qengine.Request(list(ids), **fields)


def anew(engine, request):
    """The answer of an engine that remembers nothing."""
    engine.clear_cache()
    generation = engine.submit(request)
    answer = read(generation)
    assert generation.n_cached == 0
    return answer


def read(generation):
    return [delta.token_id for delta in generation]


def prompts(engine, n=4):
    """Prompts of about 400 tokens that share their first half."""
    shared = engine.tokenizer.encode(LONG_TEXT)[:230]
    rng = np.random.default_rng(1)
    return [shared + rng.integers(0, 4000, 150 + 20 * i).tolist() for i in range(n)]


def test_reused_prompts_give_the_same_bits(empty):
    """Prompts with a common beginning, once more, and cut: answers drawn from their logits."""
    asked = [*prompts(empty), *prompts(empty)]
    asked += [asked[0][:n] for n in (1, 64, 65, 128, 300)]
    want = [anew(empty, drawn(ids)) for ids in asked]
    empty.clear_cache()
    generations = []
    for ids in asked:
        generations.append(empty.submit(drawn(ids)))
        generations[-1].wait()
    assert [read(g) for g in generations] == want
    assert [g.n_cached for g in generations] == [0, 0, 192, 192, 320, 384, 384, 384, 0, 0, 0, 64, 192]


def test_an_answer_does_not_depend_on_who_brings_it_as_a_prompt(empty):
    """The prompt and answer of one request are the prompt of another. Pages of decoded tokens hold other bits than
    pages of the same tokens in a prompt, so the first request must still have the log-probabilities that it has
    alone."""
    ids = prompts(empty)[0][:100]
    asked = drawn(ids, max_tokens=120, temperature=0, top_logprobs=0)
    want = list(empty.submit(asked))
    answer = [delta.token_id for delta in want]
    empty.clear_cache()
    generations = [empty.submit(asked), empty.submit(drawn(ids + answer[:100], max_tokens=100))]
    assert list(generations[0]) == want
    read(generations[1])
    assert read(empty.submit(generations[1].request)) == anew(empty, generations[1].request)


def test_requests_that_run_together_share(empty):
    asked = [drawn(ids, seed) for seed, ids in enumerate(prompts(empty, 8))]
    want = [anew(empty, request) for request in asked]
    empty.clear_cache()
    assert [read(g) for g in [empty.submit(request) for request in asked]] == want
    assert empty.stats()["cached_tokens"] > 5 * 192


@pytest.mark.parametrize("late", [False, True], ids=["at once", "as late as may be"])
def test_checkpoints_in_host_memory(late):
    """Two checkpoints on the card, many in host memory: eight texts come back one after the other."""
    small = load_tiny(EmulatedCard(late=late), checkpoint_memory=0, slots=1)
    asked = [drawn(np.random.default_rng(seed).integers(0, 4000, 100)) for seed in range(8)]
    want = [read(small.submit(request)) for request in asked]
    before = small.stats()
    assert before["checkpoints_on_card"] == LEAST_CHECKPOINTS and before["checkpoints_spilled"] >= 6
    again = [small.submit(request) for request in asked]
    assert [read(generation) for generation in again] == want
    assert [generation.n_cached for generation in again] == [64] * 8
    assert small.stats()["checkpoints_fetched"] >= 6
    small.close()


def test_without_host_memory_for_checkpoints(card, monkeypatch):
    """None is given, or none can be page-locked: what does not fit on the card is forgotten."""
    for options in {"checkpoint_host_memory": 0}, {}:
        small = load_tiny(card, checkpoint_memory=0, slots=1, **options)
        monkeypatch.setattr(card, "pinned", lambda *arguments: (_ for _ in ()).throw(CardError("no more")))
        asked = [drawn(np.random.default_rng(seed).integers(0, 4000, 100), max_tokens=2) for seed in range(4)]
        for request in asked:
            small.submit(request).wait()
        again = [small.submit(request) for request in reversed(asked)]
        assert [(generation.wait(), generation.n_cached)[1] for generation in again][:2] == [64, 64]
        assert small.stats()["checkpoints_spilled"] == 0 and small.stats()["checkpoints_dropped"] >= 2
        small.close()
        monkeypatch.undo()


def test_states_of_decoded_tokens(empty):
    """The answer goes on from states that decode made: what it predicts is what it would predict without them, but for
    the rounding by which prompts and decoded tokens differ."""
    ids = prompts(empty)[0]
    answer = anew(empty, drawn(ids, max_tokens=150))
    longer = ids + answer + ids[:20]

    def logits():
        generation = empty.submit(drawn(longer, max_tokens=1))
        generation.wait()
        return empty.cards[0].download(empty.pipeline.last.model.logits[0]), generation.n_cached

    reused, n_cached = logits()
    assert n_cached == whole_pages(len(ids) + len(answer) - 1)
    empty.clear_cache()
    want, n_cached = logits()
    assert n_cached == 0
    difference = np.abs(reused - want).max()
    assert 0 < difference < 0.05 * want.std()           # measured: 0.022
    assert want.max() - want[reused.argmax()] < 2 * difference


def test_what_load_refuses(card):
    with pytest.raises(qengine.RequestError, match="kv_tokens must be at least the 1024 tokens of a context, not 1000"):
        load_tiny(card, kv_tokens=1000)


# ---- a conversation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_a_conversation(card, thinking):
    """With the model that comes along: a system prompt, four turns, the last one edited and asked once more. Each
    processes its new tokens and 64 others at most, and each answer is that of an engine that remembers nothing."""
    talker = qengine.load(card=card, ctx=2048, slots=2, progress=False)
    messages = [{"role": "system", "content": "You are a patient helper. " * 12}]
    known, asked = [], []

    def ask(question):
        history = [*messages, {"role": "user", "content": question}]
        ids = talker.encode(talker.template.render(history, enable_thinking=thinking))
        request = qengine.Request(ids, max_tokens=90)
        generation = talker.submit(request)
        answer = read(generation)
        new = len(ids) - common(ids, known)
        assert 1 <= len(ids) - generation.n_cached <= new + PAGE_TOKENS, (question, new, generation.n_cached)
        is_of_prompts = generation.n_cached <= common(ids, [a.prompt_ids for a, *_ in asked])
        known.extend([ids, ids + answer[:-1]])
        asked.append((request, answer, is_of_prompts))
        return [*history, {"role": "assistant", "content": talker.tokenizer.decode(answer)}]

    for question in ("What is 12 + 7?", "And 3 more? " * 10, "Which word did I repeat?", "What is 5 + 5?"):
        before, messages = messages, ask(question)
    messages = before
    ask("What is 5 + 6?")
    ask("What is 5 + 6?")
    assert sum(is_of_prompts for *_, is_of_prompts in asked) >= 3
    for request, answer, is_of_prompts in asked:
        if is_of_prompts:
            assert anew(talker, request) == answer
    talker.close()
