"""What the small model is trained and judged on: generators of examples, their text, and scores.

    example = sample(random.Random(0))               an example of a random task
    example = TASKS["recall"][1](rng, held=True, length=1000)
    render(example), render(example, for_generation=True)
    score(example, generated_text)

A generator is make(rng, held=False, length=None, lang=None) -> Example: held=True draws only from what
training never sees, length is in tokens (recall and text), lang is "en", "ko", or None for either.

Held out by construction. Contents (names, cities, numbers, codes, names of tools, lists, sums, and the names
of fields and kinds drawn for an example) are held out when their SHA-256 says so, `is_held`, see words.py;
questions about facts when the facts' files say so, see facts.py; sums by their steps, see reasoning.py. What
few there are of is not held out: colours, the fields of words.toml, single words of the dictionary, sums and
products of numbers up to ten; nor are integers, years and choices that only have to be passed on.
"""

import random

from . import documents, facts, lists, objects, people, pictures, reasoning, recall, structured, tools
from .example import Example, estimate_tokens, own_answer, render
from .facts import asks_in_trained_words
from .judge import json_is_valid, parse_tool_calls, score
from .words import is_held

__all__ = ["COMPACT", "ENFORCED", "LATER", "NEW_WORDS", "SIGHT", "TASKS", "Example", "asks_in_trained_words",
           "estimate_tokens", "heldout_text", "is_held", "json_is_valid", "own_answer", "parse_tool_calls", "render",
           "sample", "score"]

# name: (how often, generator). Examples differ in length: of all tokens pictures are a quarter, recall nearly as much,
# tools a fifth, facts a seventh, while self, people, reasoning and lists together are an eighth.
TASKS = {
    "facts": (84, facts.make),
    "self": (26, facts.make_self),
    "recall": (5, recall.make),
    "people": (34, people.make),
    "tools": (46, tools.make),
    "json": (13, structured.make),
    "objects": (8, objects.make),
    "reasoning": (34, reasoning.make),
    "lists": (12, lists.make),
    "text": (0.4, documents.make),
    "pictures": (80, pictures.make),
}

# How often in held-out text, whatever is trained on: perplexities of different trainings are of the same text.
TEXT_WEIGHTS = (44, 20, 4, 18, 40, 10, 8, 14, 10, 0.5, 90)

# To judge with only: held-out questions in the midst of a conversation, or after another language, or after a picture,
# or in the words of one more hand, by which trainings are chosen; what newcomers ask,
LATER = {"facts, later": facts.make_later, "facts, other language": facts.make_switched,
         "facts, after a picture": pictures.make_fact_after,
         "facts, one more hand": facts.make_apart, "newcomers": facts.make_newcomer}
# and tools and fields in ordinary words that no training example has; tools of ordinary names, of which the words are
# trained, and the same requests with invented names.
NEW_WORDS = {"tools, new words": tools.make_new_words, "json, new fields": structured.make_new_fields,
             "tools, ordinary names": tools.make_ordinary, "tools, invented names": tools.make_ordinary_invented}
# Results of tools as JavaScript writes them.
COMPACT = {"tools, compact results": tools.make_compact_results}
# Objects for free questions, where generation itself has to hold an answer to the example's schema.
ENFORCED = {"objects, enforced": objects.make_enforced}
# Single questions about held-out pictures, by what they ask for; the last ones in words that training never has.
SIGHT = pictures.SECTIONS


def sample(rng: random.Random, held: bool = False, length: int | None = None, weights: tuple = ()) -> Example:
    """An example of a task chosen by weight, those of training unless others are given."""
    of_training, makers = zip(*TASKS.values(), strict=True)
    return rng.choices(makers, weights or of_training)[0](rng, held, length)


def heldout_text(rng: random.Random, n_tokens: int) -> str:
    """About n_tokens of held-out examples without pictures one after another, for perplexity."""
    texts, n = [], 0
    while n < n_tokens:
        example = sample(rng, held=True, length=400, weights=TEXT_WEIGHTS)
        if not example.pictures:
            texts.append(render(example))
            n += estimate_tokens(texts[-1])
    return "".join(texts)
