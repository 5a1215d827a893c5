"""How well a model predicts a text, alone or compared with another model."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tqdm

import qengine
from engine.request import ModelError, RequestError
from kernels.card import CardError
from kernels.limits import FLOAT16

from .engines import load_engine, memories, traced


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text of n + 1 tokens: arrays [n], one entry for each token after the first.

    losses        float64, nats: negative log-likelihood of the token
    other_losses  the same of another model with the probabilities p', or None, as below
    divergences   float64, nats: sum of p' log(p' / p), the KL divergence of the model from the other
    same_top      bool: both find the same token likeliest
    """

    losses: np.ndarray
    other_losses: np.ndarray | None = None
    divergences: np.ndarray | None = None
    same_top: np.ndarray | None = None

    def table(self, names: list[str]) -> str:
        """For people, with the names of the one or two models at the heads of the columns."""
        columns = [losses for losses in (self.losses, self.other_losses) if losses is not None]
        rows = [("", names),
                ("tokens predicted", [f"{len(losses):,}" for losses in columns]),
                ("nats per token", [f"{losses.mean():.4f}" for losses in columns]),
                ("  standard error", [f"{losses.std() / math.sqrt(len(losses)):.4f}" for losses in columns]),
                ("perplexity", [f"{np.exp(losses.mean()):.4f}" for losses in columns])]
        if self.divergences is not None:
            middle, high, higher = np.percentile(self.divergences, [50, 99, 99.9])
            rows += [("", []),
                     ("KL divergence, mean", [f"{self.divergences.mean():.6f} nats"]),
                     ("  median", [f"{middle:.6f} nats"]),
                     ("  99 %", [f"{high:.6f} nats"]),
                     ("  99.9 %", [f"{higher:.6f} nats"]),
                     ("  max", [f"{self.divergences.max():.6f} nats"]),
                     ("same likeliest token", [f"{100 * self.same_top.mean():.2f} %"])]
        width = max(16, *map(len, names))
        return "\n".join("  ".join([f"{label:<20}", *(f"{cell:>{width}}" for cell in cells)]).rstrip()
                         for label, cells in rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities, float64, for each row of logits. Raises CardError for a NaN."""
    shifted = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    if np.isnan(shifted).any():
        raise CardError(qengine.NAN_LOGITS)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def measure_perplexity(engine: qengine.Engine, ids: list[int], against: qengine.Engine | None = None,
                       progress: bool = False) -> Perplexity:
    """Predict each token of a text but the first, once. The text has at least two tokens.

    The text is cut into windows of the context's length, and a window knows nothing of the others. A token is predicted
    from the tokens before it in its window, the first token of a window from the whole window before. against: another
    engine, to compare with. No more than HEAD_ROWS rows of logits of each engine are held at a time.
    """
    engines = [engine] if against is None else [engine, against]
    n_ctx, found = min(each.n_ctx for each in engines), []
    last = len(ids) - 1
    with tqdm.tqdm(desc="perplexity", total=last, unit="token", leave=False, disable=not progress or None) as bar:
        for start in range(0, last, n_ctx):
            window, at = ids[start:min(start + n_ctx, last)], start + 1
            for logits, *other in zip(*(each.logit_rows(window) for each in engines), strict=True):
                found.append(score_rows(ids[at:at + len(logits)], logits, *other))
                at += len(logits)
                bar.update(len(logits))
    return Perplexity(*map(np.concatenate, zip(*found)))


def score_rows(tokens: list[int], logits: np.ndarray, other_logits: np.ndarray | None = None) -> tuple:
    """The fields of Perplexity for logits float32 [rows, n_vocab] and the tokens that followed each row's position."""
    rows, predicted = np.arange(len(tokens)), log_softmax(logits)
    losses = -predicted[rows, tokens]
    if other_logits is None:
        return losses,
    other = log_softmax(other_logits)
    divergences = (np.exp(other) * (other - predicted)).sum(axis=-1)
    same_top = logits.argmax(axis=-1) == other_logits.argmax(axis=-1)
    return losses, -other[rows, tokens], np.maximum(divergences, 0), same_top      # below 0 is rounding


def run_perplexity(model: qengine.OpenModel, options) -> int:
    """Prints how well a model predicts a text, perhaps beside another model, or beside itself with other pages of keys
    and values; returns the exit code."""
    ids = model.tokenizer.encode(read_text(options.perplexity))
    if len(ids) < 2:
        raise RequestError("perplexity", f"{options.perplexity}: fewer than 2 tokens, so none to predict")
    against_kv = options.against_kv or FLOAT16
    names, other = [name_of(options.model, options.kv)], None
    if options.against is not None or options.against_kv:
        path = options.against or options.model
        names, other = [*names, name_of(path, against_kv)], qengine.open_model(path).keeping(against_kv)
        if other.tokenizer.pieces != model.tokenizer.pieces:
            raise ModelError(f"{options.against}: its vocabulary is not that of {options.model}, so there is "
                             "nothing to compare")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(contextlib.closing(load_engine(model, options)))
        stack.enter_context(traced(engine, options))
        against = None
        if other:
            against = qengine.load(other, card=engine.cards[0], ctx=engine.n_ctx, draft="off", sparse=engine.sparse,
                                   mmproj="none", memory=memories(options)["memory"])       # both take of it
            stack.callback(against.close)
        measured = measure_perplexity(engine, ids, against, progress=True)
    print(measured.table(names))
    return 0


def name_of(path: str, kv: str) -> str:
    """What the table calls a model."""
    return Path(path).name.removesuffix(".gguf") + f" ({kv})" * (kv != FLOAT16)


def read_text(path: str) -> str:
    """The text of a file, its line ends as they are. Raises RequestError where it cannot be read or is not UTF-8."""
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise RequestError("perplexity", f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError("perplexity", f"{path}: not UTF-8 text (byte {error.start})") from None
