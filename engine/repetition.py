"""A guard against answers that repeat themselves for ever, as models sometimes do, until the context is full."""

import numpy as np

from engine.limits import LONGEST_PERIOD, REPEATED_TOKENS

WITHIN = bytes(range(0x80, 0xC0))       # the bytes of a letter in UTF-8 after its first one
PERIODS = np.arange(1, LONGEST_PERIOD + 1)


class RepetitionGuard:
    """Notices that an answer ends with at least REPEATED_TOKENS tokens that repeat a period of at most LONGEST_PERIOD
    tokens exactly. So a long table without contents, a dump of zeros and the like are ended, too, even if the prompt
    asks for them in words; they go on where the prompt holds the repeated text, and where the guard is off.

    A text that the prompt holds may be repeated without end, since the prompt may have asked for that. The period and
    the prompt are compared as text, because the same text can be cut into other tokens. Neither white space nor case
    counts, and the period may begin at any of its letters.

    A token takes some microseconds and the memory does not grow. The prompt is looked at when an answer has repeated
    itself, which takes milliseconds.
    """

    def __init__(self, tokenizer, prompt_ids: list[int]):
        self.tokenizer, self.prompt_ids = tokenizer, prompt_ids
        self.latest = np.full(LONGEST_PERIOD, -1)               # the latest tokens, the last one first
        self.lengths = PERIODS      # for each period: how many tokens at the answer's end consist of repetitions of it

    def push(self, token: int) -> bool:
        """Take the next token of an answer. Returns whether the answer repeats itself and was not asked to."""
        self.lengths = np.where(self.latest == token, self.lengths + 1, PERIODS)
        self.latest[1:] = self.latest[:-1]
        self.latest[0] = token
        found = np.flatnonzero(self.lengths == REPEATED_TOKENS)
        return found.size > 0 and not self.is_asked(self.latest[found[0]::-1].tolist())

    def is_asked(self, period: list[int]) -> bool:
        """Whether the prompt holds the text of a period of tokens, begun anywhere."""
        text = squeezed(self.tokenizer, period)
        if not text:
            return False
        text = text[:(text + text).find(text, 1)]       # "haha", if that is a token, repeats "ha"
        prompt, half = squeezed(self.tokenizer, self.prompt_ids), len(text) // 2
        if text[:half] not in prompt and text[half:] not in prompt:
            return False            # wherever the period is begun, it holds one of its halves whole
        return any(text[i:] + text[:i] in prompt for i in range(len(text)))


def squeezed(tokenizer, ids) -> str:
    """The text of tokens without white space and in one case. If the tokens begin within a letter, its first bytes are
    taken to be at their end, as they are in a period."""
    text = tokenizer.bytes_of(ids)
    rest = text.lstrip(WITHIN)
    text = rest + text[:len(text) - len(rest)]
    return "".join(text.decode("utf-8", "surrogateescape").casefold().split())
