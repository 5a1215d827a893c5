"""A budget of thoughts: once an answer's thoughts have so many tokens, the tag that ends thoughts is forced, as tokens
of a grammar are (engine/constraints.py): the sampler may choose nothing else.
"""

import codecs
import collections
import copy

from engine.constraints import Constraint
from engine.request import Request, RequestError
from engine.tokenizer import Tokenizer


def constraint_of(request: Request, tokenizer: Tokenizer, grammar: Constraint | None) -> "Budget | Constraint | None":
    """What a request allows in its answer. grammar: the Constraint of the request's grammar."""
    return Budget(request, tokenizer, grammar) if request.limits_thoughts else grammar


class Budget:
    """What a budget of thoughts still allows in one answer, and the answer's grammar, if it has one.

    Thoughts begin where the answer does or, if the request has a `stop_pause`, with that token as the answer's first.
    They end with the token `stop_after`, or with a call of a tool. The budget counts the tokens between. When they are
    spent, and the character is whole that they end in, thoughts end as models end them: with a line break, unless there
    is one already, and the tag.

    Before that and afterwards the budget allows every token, so such an answer is decoded as fast as one without a
    budget: `binds` says which tokens have to wait for a mask.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, grammar: Constraint | None):
        self.grammar, self.pieces = grammar, tokenizer.pieces
        self.first, self.end, self.call = request.stop_pause, request.stop_after, request.stop_before
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.line_break = tokenizer.encode("\n", allow_special=False)
        self.left: int | None = request.thinking_budget     # tokens of thoughts to come, None once they are over
        self.is_waiting = self.first is not None            # whether thoughts have not begun and still may
        self.closing = collections.deque()                  # the tokens that end the thoughts, and come next
        if not self.is_waiting:
            self._spend(0, request.prompt_ids[-1])

    @property
    def forced(self):
        return self.closing or (self.grammar.forced if self._is_ruled else ())

    @property
    def matcher(self):
        """The matcher of the grammar; None while every token is allowed."""
        return self.grammar.matcher if self._is_ruled else None

    @property
    def error(self) -> RequestError | None:
        return self.grammar and self.grammar.error

    def allows(self, token: int) -> bool:
        """See `Constraint.allows`."""
        if self.closing:
            return token == self.closing[0]
        return not self._is_ruled or self.grammar.allows(token)

    def followed_by(self, token: int) -> "Budget":
        """See `Constraint.followed_by`."""
        other = copy.copy(self)
        other.decoder, other.closing = copy.copy(self.decoder), self.closing.copy()
        if self.grammar is not None:
            other.grammar = self.grammar.followed_by(token)
        other._follow(token)
        return other

    @property
    def ended(self) -> bool:
        return self.grammar is not None and not self.closing and self.grammar.ended

    @property
    def _is_ruled(self) -> bool:
        return self.grammar is not None and self.grammar.binds()

    def binds(self, ahead: int = 0) -> bool:
        """See `Constraint.binds`."""
        if self.grammar is not None and self.grammar.binds(ahead):
            return True
        return self.left is not None and (bool(self.closing) or self.left + self.is_waiting <= ahead)

    def take(self, token: int):
        """The answer goes on with `token`."""
        if self.grammar is not None:
            self.grammar.take(token)
        self._follow(token)

    def _follow(self, token: int):
        if self.closing:
            self.closing.popleft()
            self.left = self.left if self.closing else None
        elif self.is_waiting:
            self.is_waiting = False
            self.left = self.left if token == self.first else None
            self._spend(0, token)
        elif token in (self.end, self.call):
            self.left = None
        else:
            self._spend(1, token)

    def _spend(self, n: int, token: int):
        """The thoughts are longer by n tokens. token: the latest one."""
        if self.left is None:
            return
        self.left -= n
        self.decoder.decode(self.pieces[token])
        begun, _ = self.decoder.getstate()                  # bytes of a character that is not whole
        if self.left <= 0 and not begun:
            is_new_line = self.pieces[token].endswith(b"\n")
            self.closing.extend([*(() if is_new_line else self.line_break), self.end])
