"""Constraints: grammars that answers obey. llguidance says, token by token, what may follow. While a card runs the
layers of a token, the host makes the mask for the next one; the sampling kernels apply the mask on the card.
"""

import collections
import functools
import weakref

import llguidance

from engine.request import RequestError
from engine.tokenizer import Tokenizer


class Constraint:
    """What a grammar still allows in one answer, or in the part of the answer that follows the token `after`.

    If a grammar allows only one next token, that token is forced. The keys, values and states of forced tokens are
    needed like those of other tokens. If one answer runs alone, the scheduler computes several forced tokens in one
    pass (`Scheduler._append_forced`); otherwise each takes a decode step with a mask of one bit. Forced tokens are
    frequent: benchmarks/constraints.py counts them. They are decoded, not run as a prompt: a prompt's pass rounds
    differently, so the bits of an answer would depend on how its tokens came.

    A matcher of llguidance never raises an error. After an error its mask is not empty either, so nothing would show
    the error. So the caller asks for `error` after each call, the first one included.
    """

    def __init__(self, vocabulary: "Vocabulary", grammar: str, after: int | None = None):
        self.vocabulary = vocabulary        # kept for as long as the matcher may call it
        self.after = after                  # None once the grammar applies
        self.matcher = vocabulary.compile(grammar).deep_copy()
        self.forced = collections.deque()   # forced tokens that come next; the matcher has taken them already
        self._look_ahead()
        self.matcher.compute_bitmask()      # the first mask takes long, and here no other answer waits for it

    @property
    def error(self) -> RequestError | None:
        """Why the answer cannot go on; None while it can."""
        if self.matcher.is_error():
            reason = self.matcher.get_error().removesuffix("<non-verbose/>").strip()
            reason = "nothing that it allows can follow" if reason.startswith("NoExtension") else reason
            return RequestError("grammar", f"the grammar cannot be followed: {reason}")
        return None

    def binds(self, ahead: int = 0) -> bool:
        """Whether the grammar may rule the choice of the token after the next `ahead`, of which nothing is known yet.
        The scheduler makes a mask for that token, or has to read the tokens before it first."""
        return self.after is None or ahead > 0

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return self.after is None and not self.forced and self.matcher.is_stopped()

    def take(self, token: int):
        """The answer goes on with `token`, which the mask has allowed."""
        if self.after is not None:
            self.after = None if token == self.after else self.after
        elif self.forced:
            self.forced.popleft()
        else:
            self.matcher.consume_token(token)
            self._look_ahead()

    def _look_ahead(self):
        """Collect the tokens that the grammar forces from here on."""
        if not self.matcher.is_stopped() and (tokens := self.matcher.compute_ff_tokens()):
            self.matcher.consume_tokens(tokens)
            self.forced.extend(tokens)


FORCED_LETTERS = 1024       # most letters of forced text that are tokenised at once, while the scheduler waits
KEPT_GRAMMARS = 32          # compiled grammars that are kept for later answers under the same schema or tools
GRAMMAR_LIMITS = llguidance.LLParserLimits(verbose_errors=False)        # its error messages go to clients


def compile_grammar(prepared: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the start of an answer. Compiling takes milliseconds and releases the interpreter's lock; copying a
    compiled matcher takes microseconds.

    Some grammars, in which many patterns overlap, take unlimited time to compile. A caller with grammars of strangers
    must count their patterns first, as api/strings.py does. Making a mask is limited: llguidance's limits suit a
    scheduler that waits for masks. With grammars made to be slow, the slowest mask took 33 ms; slower grammars are
    refused with the limit's name, at the start or later (benchmarks/results.md)."""
    return llguidance.LLMatcher(prepared, grammar, log_level=0, limits=GRAMMAR_LIMITS)


class Vocabulary:
    """A tokenizer as llguidance wants it. Tags (<think>, ...) are special tokens here, unlike in engine/tokenizer.py: a
    grammar must name them, and plain text never gives them.

    compile(grammar): a matcher from a cache, which all callers share: deep_copy it before it takes tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.tokens = tokenizer, tokenizer.pieces
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_ids), None
        self.special_token_ids = [*tokenizer.control.values(), *tokenizer.tags.values()]
        # The library refers back to this object. With a strong reference the two would keep each other for ever, as the
        # garbage collector does not see the library's side.
        wrapper = llguidance.TokenizerWrapper(weakref.proxy(self))
        self.prepared = llguidance.LLTokenizer(wrapper, eos_token=sorted(tokenizer.eos_ids))
        self.compile = functools.lru_cache(KEPT_GRAMMARS)(functools.partial(compile_grammar, self.prepared))

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell the beginning of a text. llguidance asks for them where a grammar forces the text. The
        tokenizer cuts the text, unless it would add a space in front or turn a tag's name into the tag; then llguidance
        does."""
        text = text[:FORCED_LETTERS]
        ids = self.tokenizer.encode(text, allow_special=False)
        is_spelt = b"".join(self.tokens[i] for i in ids) == text.encode()
        return ids if is_spelt and not set(ids) & set(self.special_token_ids) else self.prepared.greedy_tokenize(text)
