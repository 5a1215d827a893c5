"""Which tokens change where a prompt leaves out keys: `python -m benchmarks.sparse_tokens`, in PyTorch.

The shipped model in float32 (models/network.py) reads held-out prompts whole, and then with the pages of keys that
kernels/block_sparse.py chooses; the choice is made of float32 here. With --card the engine reads them instead, with its
own numbers and kernels, which is several times as fast. Kinds of prompts:

    recall  the questions of models/evaluate.py about people that are told of far before
    chat    conversations about everything that the model has learnt, then a question about a fact
    code    Python functions that a seed makes up, then such a question

Printed for each rule and kind, over all prompts:

    the share of the keys that were read;
    of the tokens of greedy answers to whole prompts, those that are the likeliest behind the sparse prompt, too, where
    the tokens of the answer before them are given; and those before the first one that is not (answers see all keys);
    of the likeliest tokens after every fourth token of the prompts, from the first one on that may leave out keys,
    those that are the same; and the KL divergence there, in nats.
"""

import argparse
import functools
import json
import math
import random

import numpy as np
import torch

import qengine
from benchmarks.sparse import RULES, log_softmax, same_beginning
from cli.ending import run_program
from kernels import block_sparse
from kernels.attention import PAGE
from kernels.block_sparse import MEAN, RULE
from models import evaluate, network, tasks
from models.data import prompt_of

KINDS = "recall", "chat", "code"
ANSWER = 32                 # tokens at most
STRIDE = 4                  # tokens of a prompt from one that is compared to the next
VERBS = "read write count merge split check find load store move".split()      # of made-up code
NOUNS = "page token slot row card kernel state head weight prompt".split()


# ---- prompts -----------------------------------------------------------------------------------------------


def prompt(tokenizer, kind: str, length: int, number: int) -> list[int]:
    """Token ids of a held-out prompt of about this length, the same as long as models/ is."""
    if kind == "recall":
        examples = evaluate.held_out(f"recall {length:,}", tasks.TASKS["recall"][1], length, number + 1)
        return prompt_of(tokenizer, examples[number]).ids.tolist()
    if kind == "chat":
        text = tasks.heldout_text(random.Random(f"chat {length} {number} 0"), int(1.3 * length))
    else:
        text = "<|im_start|>user\n" + made_up_code(random.Random(f"code {length} {number}"), 6 * length)
    asked = tasks.TASKS["facts"][1](random.Random(f"{kind} {length} {number} 0 q"), True, 200)
    end = "<|im_end|>\n" if kind == "code" else ""
    return (evaluate.to_ids(tokenizer, text)[:length]
            + evaluate.to_ids(tokenizer, end + tasks.render(asked, for_generation=True)))


def made_up_code(rng, n: int) -> str:
    """n characters of Python."""
    functions, n_left = [], n
    while n_left > 0:
        verb, noun, first, second = rng.choice(VERBS), *rng.sample(NOUNS, 3)
        name, limit, step = f"{verb}_{noun}", rng.randrange(2, 4096), rng.randrange(1, 9)
        functions.append(f"""def {name}({first}s, {second}, most={limit}):
    \"\"\"{verb.capitalize()} each {first} of a {second}, at most {limit} of them.\"\"\"
    found = []
    for number, {first} in enumerate({first}s):
        if {first} {rng.choice(("<", ">", "==", "!="))} {second} or number % {step}:
            found.append({first} {rng.choice("+-*&|")} {rng.randrange(1000)})
        elif len(found) == most:
            raise ValueError(f"{{{second}}} is too large: {limit} is the limit")
    return {rng.choice(("found", "sorted(found)", f"sum(found) // {step}", f"found[:{limit}]"))}


""")
        n_left -= len(functions[-1])
    return "".join(functions)[:n]


# ---- attention ---------------------------------------------------------------------------------------------


def kept_pages(q, keys, page: int, rule):
    """bool [page + 1]: the pages that page number `page` reads. q [heads, rows, D]: its queries with attention's scale;
    keys [tokens, D]: of the one KV head."""
    free = torch.arange(page + 1).ge(rule.sinks) & torch.arange(page + 1).lt(page + 1 - rule.near)
    if page < rule.dense or not free.any():
        return torch.ones(page + 1, dtype=torch.bool)
    means = torch.cat([each.mean(dim=1) for each in q.split(MEAN, dim=1)])
    masses = (means @ keys[:page * PAGE].T).unflatten(1, (page, PAGE)).logsumexp(2).softmax(1).sum(0)
    order = masses.where(free[:page], -1.0).argsort(descending=True)[:int(free.sum())]
    always = masses[~free[:page]].sum()
    held = torch.cat([always[None], always + masses[order].cumsum(0)])
    n_enough = int((held < masses.sum() * (1 - 2.0 ** -rule.spare)).sum())
    budget = max(rule.base + (page + 1) // rule.share - int((~free).sum()), 0)
    free[order[:min(n_enough, budget)]] = False
    return ~free


def attention_of(rule, n_padded: int, counts: list[int]):
    """A function in the place of network.attend, for a row that begins with so many tokens that do not count. counts:
    grow by the pages that are read, and by those that there are. rule: None for all."""
    def attend(q, k, v, mask, original=network.attend):
        if q.shape[2] == 1:                     # a token of an answer
            return original(q, k, v, mask)
        out, scale = torch.zeros_like(q), q.shape[3] ** -0.5
        q, keys, values = q[0, :, n_padded:] * scale, k[0, 0, n_padded:], v[0, 0, n_padded:]
        for page, own in enumerate(q.split(PAGE, dim=1)):
            end, n = page * PAGE + own.shape[1], own.shape[1]
            kept = torch.ones(page + 1, dtype=torch.bool) if rule is None else kept_pages(own, keys, page, rule)
            counts[0], counts[1] = counts[0] + int(kept.sum()), counts[1] + page + 1
            read = kept.repeat_interleave(PAGE)[:end]
            scores = own @ keys[:end][read].T
            scores[:, :, -n:] += torch.full((n, n), -math.inf).triu(1)
            out[0, :, n_padded + page * PAGE:n_padded + end] = scores.softmax(2) @ values[:end][read]
        return out

    return attend


# ---- texts -------------------------------------------------------------------------------------------------


class Text:
    """A prompt that was read, whole or by a rule."""

    def __init__(self, net, ids: list[int], rule=None):
        self.net, self.n, self.counts, self.caches = net, len(ids), [0, 0], [{} for _ in net.trunk]
        self.n_padded = n = -len(ids) % PAGE    # in front: the last rows of the delta rule's chunks are the prompt's
        row, position = torch.tensor([[0] * n + ids]), torch.cat([torch.arange(n), torch.arange(len(ids))])[None]
        whole, network.attend = network.attend, attention_of(rule, n, self.counts)
        try:
            self.hidden = net.hidden(row, position, None, self.caches)[0, n:]
        finally:
            network.attend = whole

    def log_probabilities(self):
        """[rows, vocabulary], after every STRIDE-th token."""
        return torch.cat([self.net.logits(some).log_softmax(1) for some in self.hidden[::STRIDE].split(1024)])

    def answer(self, end: int, given: list[int] | None = None) -> list[int]:
        """Likeliest tokens behind the prompt, up to `end`, or ANSWER of them; or behind those of a given answer."""
        found, logits = [], self.net.logits(self.hidden[-1])
        while True:
            found.append(int(logits.argmax()))
            token = given[len(found) - 1] if given else found[-1]
            if token == end or len(found) == ANSWER:
                return found
            position = torch.tensor([[self.n + len(found) - 1]])
            mask = torch.arange(self.n_padded + self.n + len(found)).ge(self.n_padded)[None, None, None]
            logits = self.net.logits(self.net.hidden(torch.tensor([[token]]), position, mask, self.caches))[0, 0]


def compared(net, ids: list[int], end: int, rules: dict) -> dict:
    """Name of a rule -> what it changes in a prompt, see `show`."""
    whole, found = Text(net, ids), {}
    answer, dense = whole.answer(end), whole.log_probabilities()
    for name, rule in rules.items():
        text, first = Text(net, ids, rule), rule.dense * PAGE // STRIDE
        sparse = text.log_probabilities()
        same = sparse.argmax(1) == dense.argmax(1)
        tokens = text.answer(end, answer)
        found[name] = {"read": text.counts[0], "seen": text.counts[1], "answer": len(answer),
                       "same_answer": sum(a == b for a, b in zip(tokens, answer)),
                       "same_beginning": same_beginning(tokens, answer), "rows": len(same[first:]),
                       "same": int(same[first:].sum()),
                       "divergence": (dense.exp() * (dense - sparse)).sum(1)[first:].sum().item()}
    return found


def compared_by_engine(engine, ids: list[int], rules: dict) -> dict:
    """The same of an engine whose requests may ask for sparse prompts."""
    def read(is_sparse):
        """(the Generation of an answer, its tokens, log-probabilities after every STRIDE-th token of the prompt)."""
        engine.clear_cache()
        generation = engine.submit(qengine.Request(ids, max_tokens=ANSWER, sparse=is_sparse))
        answer = [delta.token_id for delta in generation]
        engine.sparse = "on" if is_sparse else "ask"
        rows = np.concatenate([part[-start % STRIDE::STRIDE] for start, part in starts_of(engine.logit_rows(ids))])
        engine.sparse = "ask"
        return generation, answer, log_softmax(rows)

    (_, answer, dense), found = read(False), {}
    for name, block_sparse.RULE in rules.items():
        (generation, tokens, sparse), first = read(True), block_sparse.RULE.dense * PAGE // STRIDE
        same = sparse.argmax(1) == dense.argmax(1)
        found[name] = {"read": generation.keys_read, "seen": generation.keys_seen, "answer": len(answer),
                       "same_answer": likeliest_of(engine, ids, answer),
                       "same_beginning": same_beginning(tokens, answer), "rows": len(same[first:]),
                       "same": int(same[first:].sum()),
                       "divergence": float((np.exp(dense) * (dense - sparse)).sum(1)[first:].sum())}
    block_sparse.RULE = RULE
    return found


def likeliest_of(engine, ids: list[int], answer: list[int]) -> int:
    """How many tokens of an answer are the likeliest behind a sparse prompt and the tokens of the answer before them.
    Behind the first one that is not, the engine reads those tokens as a part of the prompt, so sparsely, too."""
    n_same = start = 0
    while start < len(answer):
        request = qengine.Request(ids + answer[:start], max_tokens=len(answer) - start, sparse=True)
        n = same_beginning([delta.token_id for delta in engine.submit(request)], answer[start:])
        n_same, start = n_same + n, start + n + 1
    return n_same


def starts_of(parts):
    """(how many rows come before it, part) of each of some arrays of rows."""
    start = 0
    for part in parts:
        yield start, part
        start += len(part)


def show(name: str, kind: str, results: list[dict]) -> str:
    """A row of the table."""
    total = {key: sum(result[key] for result in results) for key in results[0]}
    rows = max(total["rows"], 1)
    return (f"| {kind}, {len(results)} | {name} | {100 * total['read'] / total['seen']:.1f} % "
            f"| {total['same_answer']} of {total['answer']} | {total['same_beginning']} "
            f"| {100 * total['same'] / rows:.2f} % | {total['divergence'] / rows:.5f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", default=evaluate.FILE, help="default: the shipped model")
    parser.add_argument("--card", help="let the engine read them, on this card")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[12_000, 16_000])
    parser.add_argument("--n", type=int, default=2, help="prompts of each kind and length (default: 2)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default: 0)")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=["default"], metavar="RULE",
                        help=", ".join(RULES))
    parser.add_argument("--json", metavar="FILE", help="write a line for each prompt there")
    options = parser.parse_args()
    net, tokenizer, _ = evaluate.load(options.model)
    end, rules = tokenizer.token_to_id("<|im_end|>"), {name: RULES[name] for name in options.rules}
    compare = functools.partial(compared, net, end=end, rules=rules)
    if options.card:
        engine = qengine.load(options.model, card=options.card, ctx=evaluate.CONTEXT, draft="off", sparse="ask")
        compare = functools.partial(compared_by_engine, engine, rules=rules)
    print("| prompts | rule | keys read | tokens of answers alike | before a difference | likeliest tokens alike "
          "| KL |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for length in options.lengths:
        for kind in options.kinds:
            results = []
            for number in range(options.first, options.first + options.n):
                with torch.inference_mode():
                    ids = prompt(tokenizer, kind, length, number)
                    results.append(compare(ids=ids))
                if options.json:
                    with open(options.json, "a") as file:
                        print(json.dumps({"kind": kind, "tokens": len(ids), "rules": results[-1]}), file=file)
            for name in rules:
                print(show(name, f"{kind} of {length:,}", [result[name] for result in results]), flush=True)


if __name__ == "__main__":
    run_program(main)
