"""Constraints: grammars that answers obey. llguidance says, token by token, what may follow. Its masks are made while a
card runs the layers of the token before, and the sampling kernels apply them there.
"""

import collections
import functools
import weakref

import llguidance

from engine.request import RequestError
from engine.tokenizer import Tokenizer


class Constraint:
    """What a grammar still allows of one answer, or of what follows the token `after` in it.

    Of what it leaves no choice of, the keys, values and states are needed like those of other tokens: of one answer
    alone the scheduler has them made by one pass for several (`Scheduler._append_certain`), else each in a step of its
    own under a mask of one bit. They are many (benchmarks/constraints.py): of the calls that the model which comes with
    qengine makes 62 to 72 %, in runs of up to 13; of a schema's values half, 6 in a row at most. A prompt's pass would
    start at a multiple of 64 and round otherwise, so that the bits of an answer would depend on how its tokens came.

    Look at `error` after each call, the first included."""

    def __init__(self, vocabulary: "Vocabulary", grammar: str, after: int | None = None):
        self.vocabulary = vocabulary        # for as long as the matcher may call it
        self.after = after                  # None once the grammar rules
        self.matcher = vocabulary.compile(grammar).deep_copy()
        self.forced = collections.deque()   # tokens that follow for certain; the matcher has taken them already
        self._look_ahead()
        self.matcher.compute_bitmask()      # the first one takes long: here nobody else waits for it

    @property
    def error(self) -> RequestError | None:
        """Why the answer cannot go on. A matcher raises nothing, and allows something after an error, too."""
        if self.matcher.is_error():
            reason = self.matcher.get_error().removesuffix("<non-verbose/>").strip()
            reason = "nothing that it allows can follow" if reason.startswith("NoExtension") else reason
            return RequestError("grammar", f"the grammar cannot be followed: {reason}")
        return None

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
        """Where the grammar spells out how the answer goes on, nothing has to be asked for a while."""
        if not self.matcher.is_stopped() and (tokens := self.matcher.compute_ff_tokens()):
            self.matcher.consume_tokens(tokens)
            self.forced.extend(tokens)


FORCED_LETTERS = 1024       # that are looked ahead: the scheduler waits for their tokens, for 200,000 letters 0.2 s
KEPT_GRAMMARS = 32          # compiled, for the next answer under the same schema or tools
GRAMMAR_LIMITS = llguidance.LLParserLimits(verbose_errors=False)        # its errors go to clients


def compile_grammar(prepared: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the start of an answer. It takes milliseconds, without the interpreter's lock; a copy of it takes
    microseconds. Of a grammar in which many patterns meet it takes without limit: whoever has grammars of strangers
    counts those first, as api/strings.py does.

    The limits of llguidance are right for a scheduler that waits for a mask: of grammars made to be slow (patterns that
    need 2^60 states, 2,000 alternatives, ambiguous recursion) the worst mask took 33 ms of 248,000 tokens or 6,000, and
    what would take longer is refused with the limit's name, at the start or on the way."""
    return llguidance.LLMatcher(prepared, grammar, log_level=0, limits=GRAMMAR_LIMITS)


class Vocabulary:
    """A tokenizer as llguidance wants it. Tags are special tokens: a grammar names them, and no text spells them.

    compile(grammar): a matcher that others may get, too, so that it is to be copied and not moved."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.tokens = tokenizer, tokenizer.pieces
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_ids), None
        self.special_token_ids = [*tokenizer.control.values(), *tokenizer.tags.values()]
        # It calls us back: a true reference would keep both for ever, which the garbage collector cannot see.
        wrapper = llguidance.TokenizerWrapper(weakref.proxy(self))
        self.prepared = llguidance.LLTokenizer(wrapper, eos_token=sorted(tokenizer.eos_ids))
        self.compile = functools.lru_cache(KEPT_GRAMMARS)(functools.partial(compile_grammar, self.prepared))

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell the beginning of a text, which llguidance asks for where a grammar leaves no choice: the
        tokenizer's, unless it would begin with a space or take a tag's name for the tag."""
        text = text[:FORCED_LETTERS]
        ids = self.tokenizer.encode(text, allow_special=False)
        is_spelt = b"".join(self.tokens[i] for i in ids) == text.encode()
        return ids if is_spelt and not set(ids) & set(self.special_token_ids) else self.prepared.greedy_tokenize(text)
