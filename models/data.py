"""From examples to training rows: the tokenizer and its training, and documents packed into rows of tokens.

Row n is a function of the seed and n alone, so that training resumes where it stopped, whatever the number of
worker processes. This file needs no PyTorch.
"""

import collections
import dataclasses
import itertools
import math
import multiprocessing
import os
import random
import re

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from models import tasks

# How text is cut before byte pairs are merged: the pre-tokenizer that GGUF files call "qwen35".
PATTERN = (r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
           r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The family's special tokens. The second list is tags that an answer may contain: they are shown as text.
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
           "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
           "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
           "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
           "<|repo_name|>", "<|file_sep|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# The generation prompt and the answer that follows it, up to the end of the turn; and the prompt with thinking on,
# where closing the tag belongs to the answer, also if there are no thoughts.
ANSWER = re.compile(r"(<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?)(.*?<\|im_end\|>)",
                    re.DOTALL)
THINKING_PROMPT = "<|im_start|>assistant\n<think>\n"

ROW_TOKENS = 4608
UNIT_ROWS = 8                # rows that are packed together by one worker
PADDING, TEXT, TARGET = 0, 1, 2  # what a token is to the loss; a target is part of an answer
SHORTEST_CONTEXT = 200


# ---- tokenizer -----------------------------------------------------------------------------------------


def byte_level_tokenizer(model: tokenizers.models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts, n_vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most n_vocab tokens, the special ones last, from the texts alone."""
    tokenizer = byte_level_tokenizer(tokenizers.models.BPE())
    tags = re.compile("|".join(map(re.escape, CONTROL + TAGS)))
    tokenizer.train_from_iterator(
        (tags.sub("\n", text) for text in texts),
        tokenizers.trainers.BpeTrainer(
            vocab_size=n_vocab - len(CONTROL) - len(TAGS), min_frequency=2, show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return tokenizer


def sample_texts(seed, n: int) -> list[str]:
    """The rendered text of n training examples, to train the tokenizer on."""
    rng = random.Random(f"tokenizer {seed}")
    return [tasks.render(draw(rng, 600)[0]) for _ in range(n)]


def sample_many_texts(seed: int, n: int, n_workers: int) -> list[str]:
    """The same by several processes, a thousand each; how many processes makes no difference."""
    with multiprocessing.get_context("spawn").Pool(n_workers) as pool:
        seeds = [(f"{seed} {part}", 1000) for part in range(n // 1000)]
        parts = pool.starmap(sample_texts, seeds, chunksize=1)
    return [text for part in parts for text in part]


def encode(tokenizer: Tokenizer, text: str, thinking: bool) -> tuple[list[int], list[int]]:
    """Token ids of a rendered example and what each is to the loss. Answers are encoded apart, as they will be
    generated: the prompt's "<think>" and newline stay two tokens, whatever the answer begins with."""
    pieces, kinds, end = [], [], 0
    answers = [match.span(2) for match in ANSWER.finditer(text)]
    if thinking:
        answers[-1] = text.rindex(THINKING_PROMPT) + len(THINKING_PROMPT), answers[-1][1]
    for start, stop in answers:
        pieces += [text[end:start], text[start:stop]]
        kinds += [TEXT, TARGET]
        end = stop
    pieces.append(text[end:])
    kinds.append(TEXT)
    encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    ids = [token for encoding in encodings for token in encoding.ids]
    return ids, [kind for kind, encoding in zip(kinds, encodings) for _ in encoding.ids]


# ---- packing -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rows:
    """Packed documents; all arrays int32 [rows, tokens]."""

    ids: np.ndarray
    position: np.ndarray  # within the document
    kind: np.ndarray      # PADDING, TEXT or TARGET
    task: np.ndarray      # index in tasks.TASKS

    @staticmethod
    def join(parts: list["Rows"]) -> "Rows":
        return Rows(*(np.concatenate(arrays) for arrays in zip(*map(dataclasses.astuple, parts))))


def draw(rng: random.Random, longest: int) -> tuple["tasks.Example", int]:
    """A training example of a random task, and the task's index. longest: tokens of the longest context."""
    weights = [weight for weight, _ in tasks.TASKS.values()]
    index = rng.choices(range(len(weights)), weights)[0]
    length = math.exp(rng.uniform(math.log(SHORTEST_CONTEXT), math.log(max(longest, SHORTEST_CONTEXT))))
    _, make = list(tasks.TASKS.values())[index]
    return make(rng, False, int(length)), index


def pack(tokenizer: Tokenizer, seed: int, unit: int, longest: int, n_rows: int = UNIT_ROWS,
         n_tokens: int = ROW_TOKENS) -> Rows:
    """One unit of rows: each document goes into the first row with room, until several found none."""
    rng = random.Random(f"{seed} {unit}")
    rows, misses = [[] for _ in range(n_rows)], 0
    free = [n_tokens] * n_rows
    while misses < 4:
        example, task = draw(rng, longest)
        ids, kinds = encode(tokenizer, tasks.render(example), example.thinking)
        row = next((i for i, room in enumerate(free) if room >= len(ids)), None)
        if row is None:
            misses += 1
            continue
        rows[row].append((ids, kinds, task))
        free[row] -= len(ids)
    return _to_arrays(rows, n_tokens)


def _to_arrays(rows: list, n_tokens: int) -> Rows:
    """A row's rest is a document of zeros that counts for nothing."""
    unit = Rows(*(np.zeros((len(rows), n_tokens), np.int32) for _ in range(4)))
    for i, documents in enumerate(rows):
        end = 0
        for ids, kinds, task in documents:
            place = (i, slice(end, end := end + len(ids)))
            unit.ids[place], unit.kind[place], unit.task[place] = ids, kinds, task
            unit.position[place] = range(len(ids))
        unit.position[i, end:] = range(n_tokens - end)
    return unit


# ---- workers -------------------------------------------------------------------------------------------

_tokenizer = None


def _start_worker(tokenizer: str):
    global _tokenizer
    os.environ["RAYON_NUM_THREADS"] = "1"  # each worker's tokenizers library would start a thread per core
    _tokenizer = Tokenizer.from_str(tokenizer)


def _pack_in_worker(*arguments) -> Rows:
    return pack(_tokenizer, *arguments)


class Batches:
    """Iterates over batches of n_rows rows of n_tokens, made ahead by worker processes.

    longest: function of the step -> tokens of the longest context, roughly.
    Raises ValueError where the rows are more than a unit and no whole units.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, first_step: int, n_rows: int, n_workers: int,
                 longest, n_tokens: int = ROW_TOKENS):
        self.size = min(n_rows, UNIT_ROWS), n_tokens
        if n_rows < 1 or n_rows % self.size[0]:
            raise ValueError(f"a step has up to {UNIT_ROWS} rows or a multiple of that, not {n_rows}")
        n_units = n_rows // self.size[0]
        self.seed, self.n_units, self.longest = seed, n_units, longest
        self.units = itertools.count(first_step * n_units)
        self.pool = multiprocessing.get_context("spawn").Pool(n_workers, _start_worker, [tokenizer.to_str()])
        self.pending = collections.deque(self._submit() for _ in range(4 * n_units + 2 * n_workers))

    def _submit(self):
        unit = next(self.units)
        longest = self.longest(unit // self.n_units)
        return self.pool.apply_async(_pack_in_worker, (self.seed, unit, longest, *self.size))

    def __next__(self) -> Rows:
        parts = []
        for _ in range(self.n_units):
            parts.append(self.pending.popleft().get())
            self.pending.append(self._submit())
        return Rows.join(parts)

    def close(self):
        self.pool.terminate()
        self.pool.join()
