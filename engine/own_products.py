"""A reader's own products of Q8_0 matrices in place of the engine's: whether they are right, or by how much they are
wrong, and what they do to the text and to the speed. See `Engine.use`."""

from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature

import numpy as np
from numba.cuda.dispatcher import CUDADispatcher

from engine.display import html_table
from engine.request import Request
from engine.talk import prompt_of
from kernels import q8_gemm
from kernels.card import Card, LaunchError

QUESTION = "What is dp4a?"          # whose answer is compared, unless the reader has another one
ANSWER_TOKENS, PROMPT_TOKENS = 48, 256      # of that answer at most, and of the prompts that are timed
ARGUMENTS = "card", "y", "stride", "w", "x", "columns", "add"       # that a product is called with
REPEATS = 3                         # of each measurement, of which the fastest counts


@dataclass(frozen=True)
class Error:
    """How far a product is from its reference on random numbers: the root mean square of the errors as a share of that
    of the results. where: which product, and the shapes."""

    product: str
    where: str
    share: float


def check_arguments(product):
    """Raises ValueError if a product is no function that takes what it is called with."""
    if not callable(product):
        raise ValueError(f"a product of yours is a function, and not {product!r}")
    if isinstance(product, CUDADispatcher):
        raise ValueError(f"{product.__name__} is a kernel; a product of yours is a function "
                         f"({', '.join(ARGUMENTS)}) that launches it")
    try:
        signature(product).bind(*ARGUMENTS)
    except TypeError as error:
        raise ValueError(f"{product.__name__} is called with ({', '.join(ARGUMENTS)}): {error}") from error


def compared(card: Card, product, n: int, k: int, rows: int, add: bool) -> tuple[str, tuple]:
    """What `q8_gemm.compare` gives, behind the shapes in words. On an emulated card every access is checked before it
    happens, since a wild one would end this Python. ValueError if the product wrote elsewhere, or its kernel would
    access what it must not, or it is no function of ARGUMENTS."""
    check_arguments(product)
    where = f"a matrix of {n} x {k}, {rows} row{'s' * (rows > 1)} of x{', added to y' * add}"
    try:
        with card.checking() if card.kind == "emulated" else nullcontext():
            got, want, bound = q8_gemm.compare(card, n, k, rows, add, product)
    except (AssertionError, LaunchError) as error:
        raise ValueError(f"{product.__name__}, {where}: {error}") from error
    return where, (got, want, bound)


def check_product(card: Card, product, n: int, k: int, rows: int, add: bool):
    """Compares a product with its reference. ValueError if they differ by more than rounding."""
    where, (got, want, bound) = compared(card, product, n, k, rows, add)
    if not (abs(got - want) <= bound).all():
        raise ValueError(f"{product.__name__}, {where}: other numbers than the reference")


def error_of(card: Card, product, n: int, k: int, rows: int, add: bool) -> Error:
    """How far a product is from its reference. ValueError if a result is no number."""
    where, (got, want, _) = compared(card, product, n, k, rows, add)
    if not np.isfinite(got).all():
        raise ValueError(f"{product.__name__}, {where}: results that are no numbers")
    return Error(product.__name__, where, float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))))


# ---- text and speed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """An engine at work: the answer to a question, its token ids, and tokens per second of prompts and of answers."""

    text: str
    ids: list[int]
    prompt_speed: float
    answer_speed: float


def run(engine, question: str) -> Run:
    """Asks and measures. A model without a chat template goes on with the question. Nothing is cached that is timed."""
    asked = prompt_of(engine, [{"role": "user", "content": question}]) if engine.template else {
        "prompt_ids": engine.encode(question)}
    told = list(engine.submit(Request(**asked, max_tokens=ANSWER_TOKENS)))
    n_prompt = max(1, min(PROMPT_TOKENS, engine.n_ctx - ANSWER_TOKENS - 1))
    prompts, answers = [], []
    for seed in range(REPEATS):
        engine.clear_cache()
        ids = np.random.default_rng(seed).integers(0, engine.config.n_vocab, n_prompt).tolist()
        generation = engine.submit(Request(ids, max_tokens=ANSWER_TOKENS, ignore_eos=True, draft=0))
        for _ in generation:                # raises what the answer fails with
            pass
        first, *_, last = generation.token_times
        prompts.append(n_prompt / (first - generation.started))
        answers.append((ANSWER_TOKENS - 1) / (last - first))
    return Run("".join(delta.text for delta in told), [delta.token_id for delta in told], max(prompts), max(answers))


@dataclass(frozen=True)
class Report:
    """What other products did. errors: of each of them the largest; before, now: the engine without and with them."""

    errors: list[Error]
    before: Run
    now: Run

    @classmethod
    def of(cls, errors: list[Error], before: Run, now: Run) -> "Report":
        """errors: of all shapes."""
        worst = {error.product: error for error in sorted(errors, key=lambda error: error.share)}
        return cls(list(worst.values()), before, now)

    @property
    def n_same(self) -> int:
        """With how many same tokens both answers begin."""
        pairs = zip(self.before.ids, self.now.ids)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.before.ids), len(self.now.ids)))

    def rows(self) -> list[list[str]]:
        before, now, n = self.before, self.now, len(self.before.ids)
        same = "the same text" if before.ids == now.ids else f"the first {self.n_same} of {n} tokens are the same"
        return [*([f"error of {error.product}", f"{100 * error.share:.2g} % of the results, largest for {error.where}"]
                  for error in self.errors),
                ["text", same], ["before", before.text], ["now", now.text],
                ["prompts", f"{before.prompt_speed:,.0f} tokens/s before, {now.prompt_speed:,.0f} now"],
                ["answers", f"{before.answer_speed:,.0f} tokens/s before, {now.answer_speed:,.0f} now"]]

    def __repr__(self):
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {said}" for name, said in rows)

    def _repr_html_(self):
        return html_table(["", ""], self.rows())
