"""Prompts that leave out keys, beside whole ones: `python -m benchmarks.sparse quality` and `... speed`.

quality: held-out recall of the shipped model (models/evaluate.py) at its longest lengths, for each of some rules
(kernels/block_sparse.py): the score, how many answers and tokens of answers are those of dense prompts, and, for each
token of the prompts behind the part that the rule leaves dense, whether the likeliest next token is the same, and the
KL divergence from dense. benchmarks/sparse_tokens.py is faster, and has other prompts, too.

speed: a prompt of 131,072 random tokens, dense and sparse, unless the options say otherwise; then with dp4a alone the
sparse one again. Random weights look at all keys alike, so what is kept there is the rule's whole budget: more than
trained weights keep. Last come the kernels by themselves, for a pass of 8,192 rows at the end of the context.
"""

import argparse
import time

import numpy as np

import qengine
from cli.ending import run_program
from engine.request import share_read
from kernels import block_sparse
from kernels.attention import attend_prefill, upload_gates
from kernels.bench import seconds_per_call
from kernels.block_sparse import RULE, Chooser, choose_pages
from kernels.kv_cache import Pages
from kernels.kv_formats import KV_FORMATS, PAGE
from kernels.products import Products
from kernels.records import Places
from kernels.rope import heads_of
from models import evaluate, tasks

LENGTHS = 12_000, 16_384    # of held-out recall: up to the longest that training has
ROOM = evaluate.CONTEXT - max(evaluate.RECALL_LENGTHS)  # tokens: prompts are longer than said, and answers follow
RULES = {"default": RULE, "64 + 1/8": RULE._replace(dense=64, base=64),
         "64 + 1/4": RULE._replace(dense=64, base=64, share=4), "128 + 1/4": RULE._replace(share=4),
         "192 + 1/16": RULE._replace(dense=192, base=192, share=16), "all but 1/64": RULE._replace(spare=6)}
SLOTS = 4                   # answers at a time
SCORED = 8                  # prompts of each length whose tokens are compared one by one
ROWS = 8192                 # of the pass whose kernels are timed
BLOCK_PAGES = 256           # of random keys, repeated along the context


# ---- quality -----------------------------------------------------------------------------------------------


def answers(engine, examples: list, sparse: bool):
    """(tokens of each answer, score, share of the keys that the prompts have read)."""
    engine.clear_cache()
    requests = [evaluate.request_of(engine, "recall", example) for example in examples]
    for request in requests:
        request.sparse = sparse
    generations = [engine.submit(request) for request in requests]
    deltas = [list(generation) for generation in generations]
    texts = ["".join(delta.text for delta in answer) for answer in deltas]
    right = sum(tasks.score(example, text) for example, text in zip(examples, texts))
    return [[delta.token_id for delta in answer] for answer in deltas], right / len(texts), share_read(generations)


def same_beginning(tokens: list[int], others: list[int]) -> int:
    """How many tokens come before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others)) if a != b), min(len(tokens), len(others)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def compared(engine, texts: list, rules: dict) -> dict:
    """Rule -> (share of likeliest tokens that are the same, mean KL divergence from dense), from the first row on that
    any of the rules leaves out keys of."""
    first = min(rule.dense for rule in rules.values()) * PAGE
    found = {name: ([], []) for name in rules}
    for ids in texts:
        engine.sparse = "ask"
        dense = log_softmax(engine.evaluate(ids)[first:])
        engine.sparse = "on"
        for name, block_sparse.RULE in rules.items():
            sparse = log_softmax(engine.evaluate(ids)[first:])
            found[name][0].append((sparse.argmax(axis=-1) == dense.argmax(axis=-1)).mean())
            found[name][1].append((np.exp(dense) * (dense - sparse)).sum(axis=-1).mean())
    engine.sparse = "ask"
    return {name: (np.mean(same), np.mean(divergence)) for name, (same, divergence) in found.items()}


def quality(options):
    engine = qengine.load(options.model, card=options.card, ctx=max(options.lengths) + ROOM, slots=SLOTS, draft="off",
                          sparse="ask", kv=options.kv)
    rules = {name: RULES[name] for name in options.rules or RULES}
    print(f"{'recall':8}{'rule':16}{'keys read':>10}{'right':>8}{'answers alike':>15}{'tokens alike':>14}"
          f"{'likeliest':>11}{'KL':>9}", flush=True)
    for length in options.lengths:
        examples = evaluate.held_out(f"recall {length:,}", tasks.TASKS["recall"][1], length, options.n)
        began = time.perf_counter()
        dense, score, _ = answers(engine, examples, False)
        seconds = time.perf_counter() - began
        print(f"{length:<8,}{'dense':16}{'':>10}{100 * score:>6.1f} %  ({seconds:.0f} s)", flush=True)
        texts = [evaluate.request_of(engine, "recall", each).prompt_ids for each in examples[:options.scored]]
        by_token = compared(engine, texts, rules)
        for name, block_sparse.RULE in rules.items():
            tokens, score, share = answers(engine, examples, True)
            alike = np.mean([a == b for a, b in zip(tokens, dense)])
            begun = sum(map(same_beginning, tokens, dense)) / sum(map(len, dense))
            same, divergence = by_token[name]
            print(f"{length:<8,}{name:16}{100 * share:>8.1f} %{100 * score:>6.1f} %{100 * alike:>13.1f} %"
                  f"{100 * begun:>12.1f} %{100 * same:>9.2f} %{divergence:>9.5f}", flush=True)
    block_sparse.RULE = RULE
    engine.close()


# ---- speed -------------------------------------------------------------------------------------------------


def prompt_seconds(engine, ids: list[int], sparse: bool) -> tuple[float, float | None]:
    """Seconds to the first token of an answer, and the share of the keys that were read."""
    engine.clear_cache()
    generation = engine.submit(qengine.Request(ids, max_tokens=1, ignore_eos=True, sparse=sparse))
    list(generation)
    return generation.token_times[0] - generation.started, share_read([generation])


def use_products(engine, wish: str):
    """From now on the engine's products of prompts are these."""
    with engine.scheduler.between_steps():
        for stage in engine.pipeline.stages:
            stage.model.products = Products.of(stage.card, wish)
            stage.model.views.clear()


def speed(options):
    engine = qengine.load(options.model, card=options.card, ctx=options.tokens + PAGE, draft="off", sparse="ask",
                          kv=options.kv, checkpoint_memory=0)
    ids = np.random.default_rng(0).integers(0, engine.config.n_vocab, options.tokens).tolist()
    prompt_seconds(engine, ids[:4096 + 512], True)
    prompt_seconds(engine, ids[:4096], False)
    for products, sparse in ("auto", True), ("auto", False), ("dp4a", True), ("dp4a", False):
        if products == "auto" or sparse or options.all:
            use_products(engine, products)
            seconds, share = prompt_seconds(engine, ids, sparse)
            print(f"{options.tokens:,} tokens, products {products}, {'sparse' if sparse else 'dense'}: "
                  f"{seconds:.2f} s, {options.tokens / seconds:,.0f} tokens/s"
                  + (f", {100 * share:.1f} % of the keys" if share else ""), flush=True)
    c, card = engine.config, engine.cards[0]
    engine.close()
    kernels(card, heads_of(c.n_heads, c.n_kv_heads), options.tokens, KV_FORMATS["float16"])


def kernels(card, heads, tokens: int, format):
    """Prints how long each kernel of a layer takes for the last ROWS rows of a context."""
    rng, n_pages, d = np.random.default_rng(0), tokens // PAGE, heads.head_dim
    rows = min(ROWS, tokens)
    block = rng.standard_normal((min(BLOCK_PAGES, n_pages), heads.n_kv_heads, PAGE, d), np.float32).astype(np.float16)
    block = card.upload(block)
    table = card.upload(rng.permutation(n_pages).astype(np.int32)[None])
    pages = Pages.alloc(card, format, (n_pages, heads.n_kv_heads, d), table, "layer")
    for array in pages.k, pages.v:
        for at in range(0, n_pages, len(block)):
            card.copy(array[at:at + len(block)], block[:n_pages - at])
    q = card.upload((rng.standard_normal((rows, heads.n_heads, d), np.float32) * d ** -0.5).astype(np.float16))
    qkv = upload_gates(card, rng.standard_normal((rows, heads.n_columns), np.float32), heads)
    out = card.alloc((rows, heads.n_heads * d), np.float32)
    places = Places(card.zeros(rows, np.int32), card.upload(np.arange(tokens - rows, tokens, dtype=np.int32)))
    chooser = Chooser.alloc(card, (heads.n_heads, heads.n_kv_heads, d), rows, n_pages, 1)
    choose = lambda: choose_pages(card, chooser, q, heads, pages, places, rows, tokens - rows)
    kept = choose()
    share = np.divide(*card.download(chooser.counts)[0].tolist())
    times = {"attention, dense": lambda: attend_prefill(card, out, q, qkv, pages, places, rows), "choice": choose,
             f"attention, {100 * share:.1f} % kept": lambda: attend_prefill(card, out, q, qkv, pages, places, rows,
                                                                            kept=kept)}
    print(f"{heads.n_heads}/{heads.n_kv_heads} heads, the last {rows:,} rows of {tokens:,}, a layer:")
    for name, launch in times.items():
        print(f"  {name:24}{1e3 * seconds_per_call(card, launch):>10.2f} ms", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("quality", "speed"))
    parser.add_argument("-m", "--model", help="default: the shipped model, or synthetic:9b for speed")
    parser.add_argument("--card", help="as for qengine.py")
    parser.add_argument("--kv", metavar="FORMAT", help="as for qengine.py")
    parser.add_argument("--n", type=int, default=100, help="prompts of each length (default: 100)")
    parser.add_argument("--scored", type=int, default=SCORED, help=f"of them compared by token (default: {SCORED})")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), metavar="RULE", help=", ".join(RULES))
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--all", action="store_true", help="also the dense prompt with dp4a alone")
    options = parser.parse_args()
    options.model = options.model or (qengine.DEFAULT_MODEL if options.what == "quality" else "synthetic:9b")
    (quality if options.what == "quality" else speed)(options)


if __name__ == "__main__":
    run_program(main)
