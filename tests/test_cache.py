"""The prefix cache: who has which page, which states are kept, what a prompt is spared, and that nothing is ever wrong.

First with a model that is none: its keys and values are hashes of all tokens up to a position, its states the tokens
seen so far, so that whatever is reused wrongly is seen when it is read. Then with real ones."""

import itertools
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import qengine
from qengine import PAGE_TOKENS

# ---- a model that remembers exactly what it was shown ------------------------------------------------------

TURN, EOS, VOCABULARY = 1, 2, 50
CHUNKS = 64, 128, 512


class FakePipeline:
    """Does at once what a Pipeline queues, and checks whatever it reads."""

    def __init__(self, n_slots, n_pages, n_numbers, n_hosts, random):
        self.pages = [[None] * PAGE_TOKENS for _ in range(n_pages)]
        self.tables, self.states = [[] for _ in range(n_slots)], [None] * n_slots   # of slots: pages, tokens seen
        self.saved, self.hosts = [None] * n_numbers, [None] * n_hosts
        self.random, self.stages, self.n_processed = random, [], 0
        self.log = []

    def start(self, slot, request, number):
        self.states[slot] = [] if number is None else list(self.saved[number])
        assert self.states[slot] == request.prompt_ids[:len(self.states[slot])]
        self.log.append(("start", request))

    def set_pages(self, slot, pages):
        self.tables[slot] = list(pages)

    def save(self, slot, number):
        self.saved[number] = tuple(self.states[slot])

    def spill(self, number, host):
        if self.random.random() < 0.01:
            return False                            # no more memory to be had
        self.hosts[host], self.saved[number] = self.saved[number], None
        return True

    def fetch(self, host, number):
        self.saved[number], self.hosts[host] = self.hosts[host], None

    def prefill(self, ids, slot, start, marks=(), tap=None):
        assert start % PAGE_TOKENS == 0 and len(self.states[slot]) == start
        self.n_processed += len(ids)
        self.log.append(("prefill", len(ids)))
        marks = dict(marks)
        for n, token in enumerate(ids, 1):
            self.see(slot, token)
            if n in marks:
                assert n % PAGE_TOKENS == 0
                self.save(slot, marks[n])
        self.check_pages(slot)

    def see(self, slot, token):
        """A token is processed: what its position holds is written."""
        state = self.states[slot]
        state.append(token)
        at = len(state) - 1
        self.pages[self.tables[slot][at // PAGE_TOKENS]][at % PAGE_TOKENS] = hash(tuple(state))

    def check_pages(self, slot):
        """All that attention reads is of this very text. (Of each page the last position stands for all.)"""
        state = self.states[slot]
        for at in {*range(PAGE_TOKENS - 1, len(state), PAGE_TOKENS), len(state) - 1}:
            page = self.pages[self.tables[slot][at // PAGE_TOKENS]]
            assert page[at % PAGE_TOKENS] == hash(tuple(state[:at + 1])), f"slot {slot} reads a wrong page at {at}"

    def answer(self, slot):
        return following(self.states[slot])

    def sample_row(self, row, slot):
        token = self.answer(slot)
        return SimpleNamespace(read=lambda: np.array([token]))

    def place(self, ids, slots, positions):
        for slot, position in zip(slots, positions):
            assert len(self.states[slot]) == position
        self.batch = list(zip(slots, ids))

    def forward(self, n):
        self.log.append(("step", n))
        for slot, token in self.batch[:n]:
            self.see(slot, token)
            self.check_pages(slot)

    def choose(self, n):
        tokens = [self.answer(slot) for slot, _ in self.batch[:n]]
        self.batch = [(slot, token) for (slot, _), token in zip(self.batch, tokens)]
        return SimpleNamespace(read=lambda: np.array(tokens))

    def step(self, n):
        self.forward(n)
        return self.choose(n)


def following(tokens):
    """The next token of a text, which depends on all of it."""
    return hash(tuple(tokens)) % VOCABULARY


TOKENIZER = SimpleNamespace(
    control={qengine.TURN: TURN}, eos_ids={EOS},
    stream_decoder=lambda: SimpleNamespace(push=lambda token: "", flush=lambda: ""))


class World:
    """A scheduler without its thread, on a fake pipeline."""

    def __init__(self, seed, n_slots=2, n_ctx=640, n_pages=20, n_numbers=4, n_hosts=2, chunk=128):
        self.random = random.Random(seed)
        self.pipeline = FakePipeline(n_slots, n_pages, n_numbers, n_hosts, self.random)
        self.cache = qengine.PrefixCache(self.pipeline, n_pages, n_numbers, n_hosts)
        self.scheduler = qengine.Scheduler(self.pipeline, self.cache, TOKENIZER, n_slots, n_ctx, chunk)
        self.n_ctx, self.n_slots, self.n_pages, self.n_numbers, self.n_hosts = (
            n_ctx, n_slots, n_pages, n_numbers, n_hosts)

    def submit(self, tokens, **fields):
        generation = qengine.Generation(qengine.Request(list(tokens), **fields), TOKENIZER)
        self.scheduler.submit(generation)
        return generation

    def step(self):
        self.scheduler.step()
        self.check()

    def finish(self, *generations):
        for _ in range(100_000):
            if all(g._done.is_set() for g in generations):
                return
            self.step()
        raise AssertionError("they never end")

    def answer(self, tokens, **fields):
        """(the answer's tokens, tokens of the prompt that were processed)."""
        before, generation = self.pipeline.n_processed, self.submit(tokens, **fields)
        self.finish(generation)
        return tokens_of(generation), self.pipeline.n_processed - before

    # ---- what must hold after every step ----

    def nodes(self):
        def below(node, tokens):
            for key, child in node.children.items():
                assert child.parent is node and child.tokens == key and child.depth == node.depth + 1
                yield child, tokens + key
                yield from below(child, tokens + key)
        return list(below(self.cache.root, ()))

    def check(self):
        cache, running, nodes = self.cache, self.scheduler.running, self.nodes()
        own = [page for s in running for page in s.pages[s.node.depth:]]
        assert sorted(cache.free_pages + [node.page for node, _ in nodes] + own) == list(range(self.n_pages))
        assert cache.n_nodes == len(nodes) and cache.n_idle == sum(not node.n_users for node, _ in nodes)
        paths = [set(s.node.path()) for s in running]
        numbers, hosts = list(cache.free_numbers), list(cache.free_hosts)
        for node, tokens in nodes:
            assert node.n_users == sum(node in path for path in paths)
            assert node.children or node.n_users or node in cache.kept, "a page that nobody can use"
            assert self.pipeline.pages[node.page][-1] == hash(tokens)
            assert (node in cache.kept) == (node.number is not None or node.host is not None)
            if node.number is not None:
                assert node.host is None and self.pipeline.saved[node.number] == tokens
                numbers.append(node.number)
            elif node.host is not None:
                assert self.pipeline.hosts[node.host] == tokens
                hosts.append(node.host)
        assert set(cache.kept) <= {node for node, _ in nodes}
        assert sorted(numbers) == list(range(self.n_numbers))
        assert len(set(hosts)) == len(hosts) and set(hosts) <= set(range(self.n_hosts))
        for sequence in running:
            path = [node.page for node in sequence.node.path()]
            assert sequence.pages[:sequence.node.depth] == path[::-1]
            assert len(sequence.pages) <= sequence.n_pages
        assert self.scheduler._unpromised_pages() >= 0, "a promise that cannot be kept"
        assert sorted(self.scheduler.free_slots + [s.slot for s in running]) == list(range(self.n_slots))


def truth(request, n_ctx):
    """The answer to a request made alone."""
    tokens, answer = list(request.prompt_ids), []
    while True:
        tokens.append(following(tokens))
        answer.append(tokens[-1])
        if tokens[-1] == EOS or len(answer) == request.max_tokens or len(tokens) >= n_ctx:
            return answer


def tokens_of(generation):
    """What an answer is by now; it can be asked for again."""
    known = generation.__dict__.setdefault("tokens", [])
    if generation._done.is_set() and not known:
        known.extend(event.token_id for event in generation)
    return known


class Talkers:
    """Makes prompts as people do: new ones, next turns, edited ones, the same again."""

    def __init__(self, random, n_ctx):
        self.random, self.n_ctx = random, n_ctx
        self.systems = [self.turn(random.choice((3, 64, 100, 200))) for _ in range(3)]
        self.known = []

    def turn(self, n):
        return [TURN, *(self.random.randrange(3, VOCABULARY) for _ in range(n))]

    def prompt(self):
        kind = self.random.random()
        if not self.known or kind < 0.2:
            tokens = self.random.choice(self.systems) + self.turn(self.random.randrange(1, 150))
        elif kind < 0.3:
            tokens = [self.random.randrange(3, VOCABULARY) for _ in range(self.random.randrange(1, 400))]
        else:
            prompt, generation = self.random.choice(self.known)
            answer = tokens_of(generation)
            if kind < 0.4:
                tokens = prompt
            elif kind < 0.5:
                tokens = prompt[:self.random.randrange(1, len(prompt) + 1)] + self.turn(5)
            else:                                    # the next turn, with all of the answer or what the template left
                tokens = prompt + answer[self.random.choice((0, 0, 7)):] + self.turn(self.random.randrange(1, 100))
        return tokens[:self.n_ctx - 1]


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 400))])
def test_anything_that_may_happen(seed):
    """Random arrivals, ends, cancellations and guests, with next to no memory: every answer is that of the request
    alone, nobody is overtaken, and after every step all is where it should be."""
    choice = random.Random(seed)
    n_slots, n_ctx = choice.randrange(1, 5), choice.choice((192, 640))
    fewest = qengine.pages_for(n_ctx)
    world = World(seed, n_slots, n_ctx, choice.randrange(fewest, 3 * fewest), choice.randrange(1, 7),
                  choice.randrange(0, 5), choice.choice(CHUNKS))
    talkers, generations = Talkers(choice, n_ctx), []
    for _ in range(600):
        event = choice.random()
        if event < 0.15:
            tokens = talkers.prompt()
            limit = choice.choice((None, 1, 5, 80, 300))
            generations.append(world.submit(tokens, max_tokens=limit, ignore_eos=False))
            talkers.known = [*talkers.known, (tokens, generations[-1])][-8:]
        elif event < 0.18 and generations:
            choice.choice(generations[-8:]).cancel()
        elif event < 0.185:
            world.cache.clear()
            world.check()
        elif event < 0.2:
            n_tokens = choice.randrange(1, n_ctx)
            try:
                with world.scheduler.borrow_slot(n_tokens):
                    pass
            except qengine.RequestError:
                assert not world.scheduler.free_slots or world.scheduler._unpromised_pages() < fewest
            world.check()
        world.step()
    world.finish(*generations)
    for generation in generations:
        got, want = tokens_of(generation), truth(generation.request, n_ctx)
        assert got == (want[:len(got)] if generation.cancelled else want)
    begun = [id(request) for kind, request in world.pipeline.log if kind == "start"]
    assert begun == [id(g.request) for g in generations if id(g.request) in begun], "somebody was overtaken"
    stats = world.scheduler.stats()
    assert stats["requests_running"] == stats["requests_waiting"] == stats["kv_pages_used"] == 0
    assert stats["kv_pages_cached"] + stats["kv_pages_free"] == stats["kv_pages"]
    world.cache.clear()
    assert len(world.cache.free_pages) == world.n_pages and not world.cache.root.children
