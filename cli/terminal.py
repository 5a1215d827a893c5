"""What a terminal adds to a conversation: line editing with a history, wrapped words, thoughts in another style.

An answer that goes to a file or a pipe is the model's own text, letter by letter. Its thoughts go to stderr.
"""

import contextlib
import json
import os
import sys
import unicodedata
from pathlib import Path

from engine.reply import Content, Message, Reply, Thought

HISTORY = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "qengine" / "history"
KEPT_LINES = 1000           # of the history
FEWEST_COLUMNS = 20         # a terminal that says it has fewer is not believed
DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
FENCE = "```"               # begins and ends a block of code


# ---- what the terminal is like -----------------------------------------------------------------------------


def has_colours(stream) -> bool:
    """Whether a stream goes to a terminal that knows colours, as its entry in terminfo says."""
    if not stream.isatty():
        return False
    try:
        import curses               # not on every system
        curses.setupterm(fd=stream.fileno())
        return curses.tigetnum("colors") >= 8
    except Exception:               # curses.error, which exists only where curses does
        return False


def columns_of(stream) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    return max(columns or 80, FEWEST_COLUMNS)     # a serial line says 0: it does not know


def is_dialogue() -> bool:
    """Whether a person types and reads here."""
    return sys.stdin.isatty() and sys.stdout.isatty()


# ---- lines that a person types -----------------------------------------------------------------------------


@contextlib.contextmanager
def line_editing(path: Path = HISTORY):
    """While the `with` body runs, `ask` edits lines, and remembers those of earlier starts. Yields `ask(prompt)`, which
    returns a message: a line, or several lines that were pasted together. Raises EOFError at the end."""
    try:
        import readline             # not on every system
    except ImportError:
        readline = None
    if not is_dialogue() or readline is None:
        yield input
        return
    pastes = "on" if has_colours(sys.stdout) else "off"         # a terminal without colours may not know them
    readline.parse_and_bind(f"set enable-bracketed-paste {pastes}")     # then line breaks of pasted text end no line
    readline.set_auto_history(False)
    for line in read_history(path):
        with contextlib.suppress(ValueError):       # a text that no terminal can have typed
            readline.add_history(line)
    mark = [f"\x01{code}\x02" if has_colours(sys.stdout) else "" for code in (BOLD, PLAIN)]     # \1 .. \2: no width

    def ask(prompt):
        text = input(prompt.join(mark))
        if text.strip():
            readline.add_history(text)
            append_history(path, text)
        return text

    yield ask


def read_history(path: Path) -> list[str]:
    """The last messages that were typed, the latest last. The file has a JSON text in each line, since a message may
    have several lines. What is no JSON, as a full disk may leave it, is left out."""
    lines, found = [], []
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-KEPT_LINES:]
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [text for text in found if isinstance(text, str)]


def append_history(path: Path, text: str):
    """Adds a message. A folder that cannot be written costs the history and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(text) + "\n")


# ---- answers -----------------------------------------------------------------------------------------------


class Wrapped:
    """Text that comes in pieces, with lines broken between words. Blocks of code keep their lines."""

    def __init__(self, write, columns: int):
        self.write, self.columns = write, columns
        self.column, self.gap, self.word = 0, "", ""        # of the line so far; spaces and a word that are held back
        self.line, self.in_code = "", False                 # the first letters of the line

    def push(self, text: str):
        for letter in map(harmless, text):
            if letter == "\n":
                self._end_line()
            elif letter == " " and not self.in_code:
                self._end_word()
                self.gap += letter
            else:
                self._add(letter)

    def flush(self):
        """Write what is held back."""
        self._end_word()
        self.gap = ""

    def _add(self, letter: str):
        self.line = (self.line + letter)[:len(FENCE)]
        if self.in_code:
            self.write(letter)
        elif is_wide(letter):               # writing without spaces may break between any two of these
            self._end_word()
            self.word = letter
            self._end_word()
        else:
            self.word += letter

    def _end_word(self):
        if not self.word:
            return
        width = width_of(self.word)
        if self.column and self.column + len(self.gap) + width > self.columns:
            self.write("\n")
            self.column, self.gap = 0, ""
        self.write(self.gap + self.word)
        self.column += len(self.gap) + width
        self.gap = self.word = ""

    def _end_line(self):
        self.flush()
        self.write("\n")
        self.in_code ^= self.line == FENCE
        self.column, self.line = 0, ""


def harmless(letter: str) -> str:
    """What stands for a letter that a terminal would obey instead of showing it: after an escape, it may even write
    into the clipboard."""
    if letter in "\n\t" or unicodedata.category(letter) != "Cc":
        return letter
    return chr(0x2400 + ord(letter)) if letter < " " else "\ufffd"      # Unicode has pictures of the first 32


def is_wide(letter: str) -> bool:
    """Whether a letter takes two columns."""
    return unicodedata.east_asian_width(letter) in "WF"


def width_of(word: str) -> int:
    """The columns that a word takes."""
    return sum(0 if unicodedata.combining(letter) else 1 + is_wide(letter) for letter in word)


def remark(text: str):
    """A line about an answer, below it on stderr. On a terminal its words are wrapped, and it is dim where there are
    colours."""
    out = sys.stderr
    if not out.isatty():
        print(text, file=out, flush=True)
        return
    dim, plain = (DIM, PLAIN) if has_colours(out) else ("", "")
    out.write(dim)
    lines = Wrapped(out.write, columns_of(out))
    lines.push(text)
    lines.flush()
    out.write(f"{plain}\n")
    out.flush()


@contextlib.contextmanager
def reading_line():
    """While the `with` body runs, a line on the terminal says how far a prompt is read. Yields show(n_read, n_prompt),
    which writes it anew, and wipes it once all is read; so does the end of the body."""
    out, shown = sys.stderr, ""

    def show(n_read, n_prompt):
        nonlocal shown
        line = f"reading {n_read:,} of {n_prompt:,} tokens" if 0 < n_read < n_prompt and out.isatty() else ""
        if line != shown:
            out.write(f"\r{' ' * len(shown)}\r{line}" if shown else line)
            out.flush()
            shown = line

    try:
        yield show
    finally:
        show(0, 0)


class Writer:
    """Reads an answer that is written as it comes. said: the Message so far."""

    def __init__(self, tokenizer, opening: str):
        """opening: how the answer begins, see engine/reply.py."""
        self.reply, self.said, self.in_thoughts = Reply(tokenizer, opening), Message(), False

    def read(self, delta) -> list:
        """The parts that are certain after another token."""
        parts = self.reply.push(delta)
        for part in parts:
            self.said.add(part)
        return parts


class PlainAnswer(Writer):
    """Writes an answer as the model does, and its thoughts to stderr."""

    def __init__(self, tokenizer, opening: str):
        super().__init__(tokenizer, opening)
        self.is_whole = opening == "content"        # it holds no thoughts, and is written as it is

    def push(self, delta):
        if self.is_whole:
            self.said.add(Content(delta.text))
            print(delta.text, end="", flush=True)
            return
        for part in self.read(delta):
            if self.in_thoughts and not isinstance(part, Thought):
                print(file=sys.stderr)
            self.in_thoughts = isinstance(part, Thought)
            print(part.text, end="", flush=True, file=sys.stderr if self.in_thoughts else sys.stdout)

    def end(self):
        print(file=sys.stderr if self.in_thoughts else sys.stdout)


class ShownAnswer(Writer):
    """Writes an answer on a terminal: words are wrapped, and thoughts stand apart, dim where there are colours."""

    def __init__(self, tokenizer, opening: str):
        super().__init__(tokenizer, opening)
        self.out = sys.stdout
        self.dim, self.plain = (DIM, PLAIN) if has_colours(self.out) else ("", "")
        self.lines = Wrapped(self.out.write, columns_of(self.out))

    def push(self, delta):
        for part in self.read(delta):
            self._turn(isinstance(part, Thought))
            self.lines.push(part.text)
        self.out.flush()

    def end(self):
        self.lines.flush()
        self.out.write(self.plain * self.in_thoughts + "\n")
        self.out.flush()

    def _turn(self, to_thoughts: bool):
        if to_thoughts and not self.in_thoughts:
            self.out.write(f"{self.dim}[thinking]\n")
        elif self.in_thoughts and not to_thoughts:
            self.lines.push("\n")
            self.out.write(f"[answer]{self.plain}\n")
        self.in_thoughts = to_thoughts


def answer_writer(tokenizer, opening: str):
    """What writes an answer to stdout: a Writer with push(delta) and end()."""
    return (ShownAnswer if sys.stdout.isatty() else PlainAnswer)(tokenizer, opening)
