"""Which control tokens of a prompt are real: those that the chat template itself wrote.

A message, the name of a tool or the key of an object may hold the name of a control token, such as <|im_start|>, or a
part of one. What a client sends must never become a control token, whatever the template does with it: it writes values
side by side, cuts them, and changes their case. So it is not the values that are guarded:

1. Control tokens in the template's own text are marked, by a letter on each side (`ControlTokens.mark`).
2. What a client sends loses these two letters (`unmarked`), and the template is rendered.
3. A control token is real if both marks enclose it. Any other gets a GUARD inside (`ControlTokens.settle`).
"""

import re

# Put inside what looks like a control token and is none. `Tokenizer.encode` looks for control tokens, and then takes
# every GUARD out. Like the marks it is a Unicode noncharacter, reserved for such use inside a program.
GUARD = "\ufdd0"
BEGIN, END = "\ufdd1", "\ufdd2"


def any_of(strings) -> re.Pattern:
    """Matches any of the strings, as a group, the longest first; nothing when there are none."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


class ControlTokens:
    """The control tokens of a vocabulary, in the text of templates and prompts. names: of two letters and more: a
    shorter one could not have a GUARD inside, and is always real."""

    def __init__(self, names):
        names = [name for name in names if len(name) > 1]
        self._any = any_of(names)
        self._marked = re.compile(BEGIN + self._any.pattern + END)
        # Two letters at least: a "<" in front of a value is mostly no control token's.
        self._heads = {name[:n] for name in names for n in range(2, len(name))}
        self._tails = {name[n:] for name in names for n in range(1, len(name) - 1)}
        self._longest = max(map(len, names), default=0)

    def mark(self, text: str) -> str:
        """A text of the template with its control tokens marked. A template may put a token together, as in
        '<|' ~ message.role ~ '|>'. So a text that ends like the beginning of a token gets the mark in front of it, and
        a text that begins like the end of a token gets the mark behind that."""
        text = self._any.sub(lambda match: BEGIN + match[0] + END, text)
        for n in range(min(self._longest, len(text)), 1, -1):
            if text[-n:] in self._heads:
                text = text[:-n] + BEGIN + text[-n:]
                break
        for n in range(min(self._longest, len(text)), 1, -1):
            if text[:n] in self._tails:
                return text[:n] + END + text[n:]
        return text

    def settle(self, text: str) -> str:
        """The prompt of a rendered template: without marks, and with a GUARD inside of what is no control token."""
        parts = self._marked.split(text)                    # what the template wrote stands at odd places
        parts[::2] = [self._broken(unmarked(part)) for part in parts[::2]]
        prompt = "".join(parts)
        is_clear = self._any.findall(prompt) == parts[1::2]
        return prompt if is_clear else GUARD.join(parts)    # two neighbours looked like another token

    def _broken(self, text: str) -> str:
        n = 1
        while n:                                            # tokens may overlap
            text, n = self._any.subn(lambda match: match[0][0] + GUARD + match[0][1:], text)
        return text
