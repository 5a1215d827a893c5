"""Constraints: grammars that answers obey. llguidance says, token by token, what may follow. While a card runs the
layers of a token, the host makes the mask for the next one; the sampling kernels apply the mask on the card.
"""

import collections
import contextlib
import copy
import itertools
import threading
import weakref

import llguidance

from engine import trials
from engine.request import RequestError
from engine.tokenizer import OneAtATime, Tokenizer

# The separators that models write (json.dumps), with and without the blank. Free white space would let small models
# write nothing else, and every character of it is one that the grammar could have forced.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Constraint:
    """What a grammar still allows in one answer, or in the part of the answer that follows the token `after`.

    If a grammar allows only one next token, that token is forced. The keys, values and states of forced tokens are
    needed like those of other tokens. Forced tokens are drafts that are certain: one step computes several of them
    (`Scheduler.decode`). They are frequent: benchmarks/constraints.py counts them. They are decoded, not run as a
    prompt: a prompt's pass rounds differently, so the bits of an answer would depend on how its tokens came.

    A matcher of llguidance never raises an error. After an error its mask is not empty either, so nothing would show
    the error. So the caller asks for `error` after each call, the first one included.
    """

    def __init__(self, vocabulary: "Vocabulary", grammar: str, after: int | None = None):
        """Raises RequestError for a grammar that is refused."""
        self.vocabulary = vocabulary        # kept for as long as the matcher may call it
        self.after = after                  # None once the grammar applies
        self.compiled = vocabulary.compile(grammar)
        self._matcher = self.compiled.matcher.deep_copy()
        self._forced = collections.deque()  # forced tokens that come next; the matcher has taken them already
        self._look_ahead()
        self._matcher.compute_bitmask()     # the first mask takes long, and here no other answer waits for it

    @property
    def forced(self):
        """The tokens that must come next; empty if there is a choice."""
        return self._forced if self.after is None else ()

    @property
    def matcher(self):
        """The matcher that knows what may come next; None while every token may."""
        return self._matcher if self.after is None else None

    @property
    def error(self) -> RequestError | None:
        """Why the answer cannot go on; None while it can."""
        if self._matcher.is_error():
            self.vocabulary.forget(self.compiled)       # whose lexer may be full
            return refusal(self._matcher.get_error())
        return None

    def binds(self, ahead: int = 0) -> bool:
        """Whether the grammar may rule the choice of a token, if the `ahead` tokens before it are not known yet. The
        scheduler makes a mask for that token, or has to read the tokens before it first."""
        return self.after is None or ahead > 0

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return self.after is None and not self._forced and self._matcher.is_stopped()

    def take(self, token: int):
        """The answer goes on with `token`, which the mask has allowed."""
        self.compiled.n_tokens += self.after is None and not self._forced
        self._follow(token)

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`."""
        if self.forced:
            return token == self.forced[0]
        return self.matcher is None or self.matcher.validate_tokens([token]) == 1

    def followed_by(self, token: int) -> "Constraint":
        """A constraint like this one after `token`, which is allowed. This one stays as it is."""
        other = copy.copy(self)
        other._matcher, other._forced = self._matcher.deep_copy(), self._forced.copy()
        other._follow(token)
        return other

    def _follow(self, token: int):
        if self.after is not None:
            self.after = None if token == self.after else self.after
        elif self._forced:
            self._forced.popleft()
        else:
            self._matcher.consume_token(token)
            self._look_ahead()

    def _look_ahead(self):
        """Collect the tokens that the grammar forces from here on."""
        if not self._matcher.is_stopped() and (tokens := self._matcher.compute_ff_tokens()):
            self._matcher.consume_tokens(tokens)
            self._forced.extend(tokens)


def along(constraint, drafts: list[int]):
    """Yields a Constraint, or a Budget of engine/thinking.py, and then what it becomes draft by draft, as long as the
    drafts are allowed and an answer may go on after them."""
    yield constraint
    for draft in drafts:
        if not constraint.allows(draft):
            return
        constraint = constraint.followed_by(draft)
        if constraint.ended or constraint.error:
            return
        yield constraint


def refusal(reason: str) -> RequestError:
    """The error of a grammar that llguidance or a trial refuses for this reason."""
    reason = reason.removesuffix("<non-verbose/>").strip()
    reason = "nothing that it allows can follow" if reason.startswith("NoExtension") else reason
    return RequestError("grammar", f"the grammar cannot be followed: {reason[:MAX_REASON]}")


FORCED_LETTERS = 1024       # most letters of forced text that are tokenised at once, while the scheduler waits
MAX_REASON = 1000           # letters of what llguidance says, which may quote the grammar
KEPT_BYTES = 32 << 20       # of compiled grammars that are kept for later answers under the same schema or tools
TOKEN_BYTES = 8 << 10       # what a lexer keeps of a token in a string of JSON whose length is limited
LARGE, LARGE_BYTES = 4 << 20, 64 << 20      # bytes from which a grammar is large; most bytes of all large ones


class Compiled:
    """A compiled grammar, which answers share: their copies of the matcher add to one lexer. n_bytes: what the grammar
    takes at first. n_tokens: those of all answers."""

    def __init__(self, grammar: str, matcher: llguidance.LLMatcher, n_bytes: int):
        self.grammar, self.matcher, self.n_bytes, self.n_tokens = grammar, matcher, n_bytes + len(grammar), 0

    @property
    def size(self) -> int:
        """An estimate, from above for nearly all grammars."""
        return self.n_bytes + TOKEN_BYTES * self.n_tokens


def compile_grammar(prepared: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the start of an answer. Compiling takes milliseconds and releases the interpreter's lock; copying a
    compiled matcher takes microseconds."""
    return llguidance.LLMatcher(prepared, grammar, log_level=0, limits=trials.LIMITS)


class Vocabulary:
    """A tokenizer as llguidance wants it. Tags (<think>, ...) are special tokens here, unlike in engine/tokenizer.py: a
    grammar must name them, and plain text never gives them.

    number: another one for each vocabulary, by which trials know it.
    """

    numbers = itertools.count()

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.tokens = tokenizer, tokenizer.pieces
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_ids), None
        self.special_token_ids = [*tokenizer.control.values(), *tokenizer.tags.values()]
        self.eos_ids, self.number = sorted(tokenizer.eos_ids), next(Vocabulary.numbers)
        weakref.finalize(self, trials.TRIALS.gone.append, self.number)
        # The library refers back to this object. With a strong reference the two would keep each other for ever, as the
        # garbage collector does not see the library's side.
        self.prepared = trials.prepared(weakref.proxy(self))
        self.large = OneAtATime()                   # for compiling large grammars
        self.lock = threading.Lock()                # guards what follows
        self.kept = collections.OrderedDict()       # grammar -> Compiled, the one used last at the end
        self.in_use = weakref.WeakSet()             # of every Compiled that is kept or has an answer

    def compile(self, grammar: str) -> Compiled:
        """A compiled grammar, whose matcher all callers share: deep_copy it before it takes tokens. Raises RequestError
        for a grammar that a trial has refused, and for a large one if there are enough large ones in use.

        After a trial, nothing here holds the interpreter's lock for more than trials.LOCK_SECONDS, nor takes more than
        the time and the memory of the last of trials.LANES. A later step is bounded by trials.LIMITS. With grammars
        made to be slow, the slowest mask took 0.1 s and the slowest token 0.03 s (benchmarks/results.md); a grammar
        that is slower ends its answer."""
        with self.lock:
            if grammar in self.kept:
                self.kept.move_to_end(grammar)
                return self.kept[grammar]
        reason, n_bytes = trials.TRIALS.verdict(grammar, self)
        if reason is not None:
            raise refusal(reason)
        with self.large if n_bytes > LARGE else contextlib.nullcontext():
            self._make_room(n_bytes)
            compiled = Compiled(grammar, compile_grammar(self.prepared, grammar), n_bytes)
            with self.lock:
                self.in_use.add(compiled)
                self.kept[grammar] = compiled
        return compiled

    def forget(self, compiled: Compiled):
        """Later answers under the same grammar compile it anew."""
        with self.lock:
            if self.kept.get(compiled.grammar) is compiled:
                del self.kept[compiled.grammar]

    def _make_room(self, n_bytes: int):
        """Forgets kept grammars until there is room for one of this size."""
        with self.lock:
            while self.kept and n_bytes + sum(one.size for one in self.kept.values()) > KEPT_BYTES:
                self.kept.popitem(last=False)
            large = sum(one.n_bytes for one in self.in_use if one.n_bytes > LARGE)
        if n_bytes > LARGE and large + n_bytes > LARGE_BYTES:
            raise RequestError("grammar", "the grammar is large, and other answers obey too many large grammars: try "
                                          "again when they have ended")

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell the beginning of a text. llguidance asks for them where a grammar forces the text. The
        tokenizer cuts the text, unless it would add a space in front or turn a tag's name into the tag; then llguidance
        does."""
        text = text[:FORCED_LETTERS]
        ids = self.tokenizer.encode(text, allow_special=False)
        is_spelt = b"".join(self.tokens[i] for i in ids) == text.encode()
        return ids if is_spelt and not set(ids) & set(self.special_token_ids) else self.prepared.greedy_tokenize(text)
