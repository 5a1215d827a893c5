"""An engine that says what it is told to, with the tokenizer and the template of the model that ships."""

import functools
import itertools
import threading

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import qengine
from engine.details import ModelDetails
from engine.images import PAD, Limits, Reader
from engine.limits import MOST_DRAFTS
from engine.pooling import PoolingEngine, RerankTemplate, TextsJob, unit
from engine.request import Generation, PromptLogprobs, Timings
from engine.speculate import Drafts
from engine.text_engine import TextEngine, TextOnly
from engine.tokenizer import encode_prompt


@functools.cache
def shipped():
    """The model that ships, opened and not loaded."""
    return qengine.open_model(qengine.DEFAULT_MODEL)


NONE = [0] * MOST_DRAFTS


class ScriptedEngine(TextOnly, TextEngine):
    """An engine without a model. script: a text, or a function that makes a text of the prompt. An answer is the whole
    text, then the end. sees: whether it takes pictures, which it reads and does not look at.

    requests, generations: those so far. checks: (drafts, accepted ones) of each check of every answer. Every token has
    the log-probability -0.5, and token 5 has -1.5. Tokens of prompts have -0.25, and token 5 has -1.25.
    """

    name, n_ctx, n_slots, reason, fault, counts_pipes = "scripted", 4096, 2, None, None, False
    cards = layers = checks = ()

    def __init__(self, script="", template=None, sees=False):
        self.tokenizer, self.template = shipped().tokenizer, template or shipped().template
        self.eyes = Reader(Limits(), self.tokenizer.control[PAD]) if sees else None
        self.details = ModelDetails.of(shipped().weights)
        self.script, self.requests, self.generations = script, [], []

    def encode(self, text):
        return encode_prompt(self.tokenizer, text, self.n_ctx)

    def submit(self, request):
        request.check(self.tokenizer.n_vocab, self.n_ctx)
        self.requests.append(request)
        prompt = self.tokenizer.decode(request.prompt_ids, special=True)
        text = self.script(prompt) if callable(self.script) else self.script
        generation = self.begin(request)
        self.generations.append(generation)
        for n, token in enumerate(itertools.chain(self.tokenizer.encode(text), [END]), start=1):
            reason = end_of(request, token, n)
            likeliest = ((token, -0.5), (5, -1.5))[:request.top_logprobs or 0]
            if generation.push(token, reason, None if request.top_logprobs is None else -0.5, likeliest):
                break
        generation.close()
        return generation

    def begin(self, request):
        """The Generation of a request."""
        generation = Generation(request, self.tokenizer)
        generation.prompt_logprobs = scores_of(request)
        for one in self.checks:
            generation.drafts.land(*one)
        return generation

    def count_pipes(self):
        return None

    def stats(self):
        running = sum(not g._done.is_set() for g in self.generations)
        counts = {"prompt_tokens": "n_prompt", "cached_tokens": "n_cached", "generated_tokens": "n_generated"}
        return {name: sum(getattr(g, field) for g in self.generations) for name, field in counts.items()} | {
            "requests_running": running, "requests_waiting": 0, "kv_pages": 64, "kv_pages_used": 16 * running,
            "checkpoints": 3, "checkpoints_on_card": 2, "checkpoints_spilled": 1, "checkpoints_fetched": 0,
            "checkpoints_dropped": 0,
            "drafts_checked": tuple(map(sum, zip(NONE, *(g.drafts.n_checked for g in self.generations)))),
            "drafts_accepted": tuple(map(sum, zip(NONE, *(g.drafts.n_accepted for g in self.generations))))}


class ScriptedPooling(PoolingEngine):
    """A pooling engine without a model. kind: "embedding" or "reranking". row: a function that makes the row of a text
    of its token ids; by default counts of its tokens, by their ids modulo n_dims. is_held: whether jobs stay unfinished
    until `release`.

    requests, jobs: those so far.
    """

    name, n_ctx, n_dims, reason, fault = "scripted-pooling", 512, 8, None, None
    cards = layers = ()

    def __init__(self, kind="embedding", row=None, is_held=False):
        self.kind, self.tokenizer, self.details = kind, shipped().tokenizer, ModelDetails.of(shipped().weights)
        self.template = RerankTemplate("<Instruct>: Find it\n<Query>: {query}\n<Document>: {document}",
                                       self.tokenizer.control) if kind == "reranking" else None
        self.row, self.is_held, self.requests, self.jobs = row or self.count, is_held, [], []

    def count(self, ids):
        counts = np.bincount(np.array(ids) % self.n_dims, minlength=self.n_dims)
        return counts if self.kind == "embedding" else counts[:1] / (1 + counts.sum())

    def submit(self, request):
        request.check(self.tokenizer.n_vocab, self.n_ctx, self.n_dims)
        self.requests.append(request)
        self.jobs.append(TextsJob(request))
        if not self.is_held:
            self.release()
        return self.jobs[-1]

    def release(self):
        """Finish what is unfinished, unless it was cancelled or takes too long."""
        for job in self.jobs:
            if job.wait(0):
                continue
            if job.is_over():
                job.close(job.overdue())
                continue
            for i, ids in enumerate(job.request.texts):
                row = self.row(ids)
                job.land(i, unit(row, job.request.dimensions) if self.kind == "embedding" else np.float32(row))

    def stats(self):
        running = sum(not job.wait(0) for job in self.jobs)
        return {"requests": len(self.jobs), "requests_running": running, "requests_waiting": 0, "kv_pages": 64,
                "kv_pages_used": running, "texts": sum(len(job.request.texts) for job in self.jobs),
                "prompt_tokens": sum(job.n_prompt for job in self.jobs), "passes": len(self.jobs)}


def scores_of(request) -> PromptLogprobs | None:
    """The log-probabilities of a prompt, as ScriptedEngine has them."""
    if (top := request.prompt_logprobs) is None:
        return None
    following = np.array(request.prompt_ids[1:], np.int32)
    ids = np.stack([following, np.full_like(following, 5)], axis=1)[:, :top]
    values = np.tile(np.float32([-0.25, -1.25]), (len(following), 1))
    return PromptLogprobs(values[:, 0], values[:, :top], ids)


class Unreal:
    """What the log and the answer ask of a generation, for those that tests make up."""

    drafts = Drafts()

    n_prompt = n_generated = 1
    n_cached, n_read, started, token_times, finish_reason, cause, error = 0, 0, 0.0, (), None, None, None

    def __init__(self):
        self.wake = threading.Event()

    def cancel(self):
        pass

    def timings(self):
        return Timings(waiting=0, prompt=1, answer=0, prompt_speed=1, answer_speed=None)


END = 6120                  # <|im_end|>


def end_of(request, token, n):
    """The finish reason if this token is the n-th of an answer; None: the answer goes on."""
    return "stop" if token in (END, *request.stop_token_ids) else "length" if n == request.max_tokens else None


@functools.cache
def vocabulary() -> LLTokenizer:
    tokenizer = shipped().tokenizer

    class Wrapped:
        eos_token_id, bos_token_id, tokens = END, None, tokenizer.pieces
        special_token_ids = [*tokenizer.control.values(), *tokenizer.tags.values()]

        def __call__(self, text):
            return tokenizer.encode(text if isinstance(text, str) else text.decode(), allow_special=False)

    return LLTokenizer(TokenizerWrapper(Wrapped()), n_vocab=tokenizer.n_vocab, eos_token=sorted(tokenizer.eos_ids))


def obeys(rules: dict, text: str) -> bool:
    """Whether an answer, the whole of it, obeys the `grammar` and `grammar_after` of a request."""
    matcher, ids = LLMatcher(vocabulary(), rules["grammar"], log_level=0), shipped().tokenizer.encode(text)
    assert not matcher.is_error(), matcher.get_error()
    if rules.get("grammar_after") is not None:
        if rules["grammar_after"] not in ids:
            return True
        ids = ids[ids.index(rules["grammar_after"]) + 1:]
    for token in ids:
        if matcher.is_stopped() or not matcher.consume_token(token):
            return False
    return matcher.is_accepting()
