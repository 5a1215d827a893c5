"""Conversations on a terminal: commands, line editing with its history, wrapped words, thoughts, speeds.

What a person sees is tested through a pseudo-terminal: a process of its own whose three streams are one.
"""

import bisect
import dataclasses
import fcntl
import io
import itertools
import json
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

import qengine
from cli import terminal
from cli.chat import COMMANDS, Chat, as_json, from_json, print_answer, speeds_of, transcript
from cli.engines import Wishes
from cli.terminal import ShownAnswer, Wrapped, answer_writer, append_history, read_history
from engine.request import Answer, Delta, Request, RequestError, deltas_of
from engine.tokenizer import ByteTokenizer
from tests.paced import PacedEngine
from tests.test_cli import GREEDY, loaded, run  # noqa: F401  a fixture
from tests.tiny import MODEL, ROOT, tiny_engine
from tests.until import PATIENCE

PROMPT, UP, ENTER = re.escape("\x1b[1m> \x1b[0m"), "\x1b[A", "\r"
COLUMNS = 60


# ---- at a pseudo-terminal ----------------------------------------------------------------------------------


class Person:
    """Types into `--chat` and reads what its terminal shows."""

    def __init__(self, home, *arguments, term="xterm-256color"):
        self.unread = "\x1b\\[[?]2004[hl]\r?" if term != "dumb" else "(?!)"      # bracketed paste on and off
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        command = [sys.executable, str(ROOT / "qengine.py"), "-m", MODEL, "--card", "emulated", "--ctx", "2048",
                   "--max-tokens", "12", *GREEDY, *arguments]
        environment = os.environ | {"XDG_STATE_HOME": str(home), "TERM": term}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
                                        start_new_session=True)
        os.close(theirs)

    def read_until(self, pattern) -> str:
        """What the terminal shows up to what matches, which is the end of what it has shown."""
        end, text = time.monotonic() + PATIENCE, ""
        while not re.search(pattern + r"\Z", text):
            left = end - time.monotonic()
            assert left > 0 and select.select([self.ours], [], [], left)[0], f"no {pattern!r} in {text!r}"
            try:
                text += os.read(self.ours, 1 << 16).decode(errors="replace")
            except OSError:                     # the process has ended
                pytest.fail(f"ended after {text!r}")
            text = re.sub(self.unread, "", text)
        return text

    def type(self, keys, until=PROMPT) -> str:
        os.write(self.ours, keys.encode())
        return self.read_until(until)

    def leave(self) -> int:
        os.write(self.ours, b"/exit\r")
        code = self.process.wait(PATIENCE)
        os.close(self.ours)
        return code


def test_a_conversation_at_a_terminal(tmp_path):
    path = tmp_path / "said.md"
    person = Person(tmp_path, "--system", "Be brief.")
    assert "Ctrl-D leaves, /help lists commands" in person.read_until(PROMPT)
    shown = person.type("/help" + ENTER)
    assert all(name in shown for name in COMMANDS)
    pasted = "\x1b[200~first line\nsecond line\x1b[201~"
    shown = person.type(pasted + ENTER)
    assert len(re.findall("\x1b\\[2mprompt [^\x1b]*tokens/s[^\x1b]*\x1b\\[0m", shown)) == 1   # one message, one answer
    assert "Traceback" not in shown
    assert "a new" not in shown and "system: Be brief." in person.type("/system" + ENTER)
    assert "/nonsense: /help lists" in person.type("/nonsense" + ENTER)
    assert f"saved as Markdown: {path}, 2 messages" in person.type(f"/save {path}" + ENTER).replace("\r\n", "")
    text = path.read_text()
    assert text.startswith("## system\n\nBe brief.\n\n## user\n\nfirst line\nsecond line\n\n## assistant\n\n")
    assert "A new conversation." in person.type("/clear" + ENTER)
    assert "File exists" in person.type(f"/save {path}" + ENTER)
    assert person.leave() == 0 and path.read_text() == text

    person = Person(tmp_path)                   # another start, which knows what was typed in the first one
    person.read_until(PROMPT)
    person.type(UP, until="/exit")
    os.write(person.ours, ENTER.encode())
    assert person.process.wait(PATIENCE) == 0
    os.close(person.ours)
    history = read_history(tmp_path / "qengine" / "history")
    assert history[:2] == ["/help", "first line\nsecond line"] and history[-2:] == ["/exit", "/exit"]
    assert (tmp_path / "qengine" / "history").stat().st_mode & 0o777 == 0o600


def test_a_terminal_that_obeys_no_codes_gets_none(tmp_path):
    person = Person(tmp_path, term="dumb")
    assert "\x1b" not in person.read_until("\n> ") + person.type("hello" + ENTER, "\n> ")
    assert person.leave() == 0


def test_pasted_lines_are_a_message_however_they_begin(monkeypatch):
    chat = Chat(SimpleNamespace(eyes=None, name="a model"), {}, Wishes(None, {}))
    typed, said, obeyed = ["/save /tmp/x\nhello", "/system a\n\n/exit", "/clear\n", "/exit"], [], []
    monkeypatch.setattr(chat, "answer", said.append)
    monkeypatch.setattr(chat, "obey", lambda *command: obeyed.append(command))
    type_in(monkeypatch)
    assert chat.run(lambda _: typed.pop(0)) == 0
    assert said == ["/save /tmp/x\nhello", "/system a\n\n/exit"] and obeyed == [("/clear", "")]


def test_a_message_that_is_stopped_while_it_is_read_is_taken_back(capsys, monkeypatch):
    engine = PacedEngine("An answer.", delay=PATIENCE)
    chat = Chat(engine, {}, Wishes(None, {}))
    chat.waiting = shown = ["a picture"]
    monkeypatch.setattr("cli.chat.message_of", lambda text, pictures: {"role": "user", "content": text})
    press_ctrl_c(monkeypatch, engine, after=0)
    chat.answer("a wrong paste")
    assert chat.messages == [] and chat.waiting is shown and engine.generations[0].cancelled
    assert "stopped; the message is taken back" in capsys.readouterr().err


@pytest.mark.parametrize("said, thinks, message", [
    ("hello", False, {"content": "hello"}), ("hmm\n</think>\n\na", True, {"reasoning_content": "hmm", "content": "a"}),
    ("a </think> b", False, {"content": "a </think> b"}), ("\n</think>\n\nb", True, {"content": "b"}),
    ("<think>\nhmm\n</think>\n\na", True, {"reasoning_content": "hmm", "content": "a"}),
    ("hmm\n</think>\n\na </think> b", True, {"reasoning_content": "hmm", "content": "a </think> b"})])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_answer_is_remembered_as_it_was_read(monkeypatch, said, thinks, message, is_terminal):
    """Thoughts apart, and no text for thoughts."""
    monkeypatch.setattr(sys, "stdout", Terminal() if is_terminal else io.StringIO())
    chat = Chat(PacedEngine(said), {}, Wishes(None, {}))
    monkeypatch.setattr("cli.chat.opening_for", lambda *_: "thought" if thinks else "content")
    chat.answer("hi")
    assert chat.messages[1] == {"role": "assistant"} | message


def test_an_answer_is_remembered_as_it_was_written(capsys):
    """Where a model holds no thoughts, the tag of thoughts is a text. (On a terminal such an answer is dim.)"""
    chat = Chat(PacedEngine("<think> is the tag of thoughts."), {}, Wishes(None, {}))
    chat.answer("What begins thoughts?")
    assert capsys.readouterr().out == chat.messages[1]["content"] + "\n" == "<think> is the tag of thoughts.\n"


def test_an_answer_that_is_stopped_stays(capsys, monkeypatch):
    engine = PacedEngine("An answer of many words.", pace=0.01)
    chat = Chat(engine, {}, Wishes(None, {}))
    press_ctrl_c(monkeypatch, engine, after=9)
    chat.answer("hello")
    said, answer = chat.messages
    assert said["content"] == "hello" and answer["content"].startswith("An answer")
    assert "; stopped" in capsys.readouterr().err


def press_ctrl_c(monkeypatch, engine, after):
    """Interrupts whoever reads an answer of the engine behind so many of its tokens."""
    submit = engine.submit

    def listen(generation, patience=None):
        yield from itertools.islice(deltas_of([generation]), after)
        raise KeyboardInterrupt

    def begun(request):
        generation = submit(request)
        generation.listen = lambda patience=None: (said and said[1] for said in listen(generation))
        return generation

    monkeypatch.setattr(engine, "submit", begun)


def test_a_line_says_how_far_a_prompt_is_read(monkeypatch):
    engine = PacedEngine("An answer.", delay=60, is_reading=True)

    class Shown(Terminal):
        def write(self, text):
            if self.getvalue().count("reading") > 1:
                engine.delay = 0.1
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Shown())
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_answer(engine, Request([1] * 1500))
    lines = re.findall(r"reading ([\d,]+) of 1,500 tokens", sys.stderr.getvalue())
    read = [int(n.replace(",", "")) for n in lines]
    assert 2 <= len(read) and read == sorted(set(read)) and 0 < read[0] and read[-1] < 1500
    _, last, after = sys.stderr.getvalue().rpartition(f"reading {lines[-1]} of 1,500 tokens")
    assert re.match(rf"\r {{{len(last)}}}\r.*prompt 1500 tokens", after)       # wiped, then the speeds
    assert sys.stdout.getvalue() == "An answer.\n"


def test_no_line_says_so_in_a_file(capsys):
    engine = PacedEngine("An answer.", delay=0.7, is_reading=True)
    print_answer(engine, Request([1] * 1500))
    assert "reading" not in capsys.readouterr().err


# ---- commands ----------------------------------------------------------------------------------------------


def type_in(monkeypatch, *lines):
    text = "".join(f"{line}\n" for line in lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


CHAT = ["-m", MODEL, "--max-tokens", "4", *GREEDY, "--chat"]


def prompts_of(monkeypatch):
    """A list that gets the prompt of each request, as text."""
    engine, prompts = tiny_engine(), []
    submit = engine.submit

    def noted(request):
        prompts.append(engine.tokenizer.decode(request.prompt_ids, special=True))
        return submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    return prompts


def test_the_system_message_is_a_part_of_each_prompt(capsys, loaded, monkeypatch):  # noqa: F811
    prompts = prompts_of(monkeypatch)
    type_in(monkeypatch, "one", "/system Answer in verse.", "two", "/clear", "three", "/exit", "four")
    code, out, err = run(capsys, *CHAT, "--system", "Be brief.")
    assert code == 0 and len(prompts) == 3 and "system: Answer in verse." in err
    assert "Be brief." in prompts[0] and "Answer in verse." not in prompts[0]
    assert "Answer in verse." in prompts[1] and "Be brief." not in prompts[1] and "one" in prompts[1]
    assert "Answer in verse." in prompts[2] and "one" not in prompts[2] and "two" not in prompts[2]
    run(capsys, "-m", MODEL, "--max-tokens", "4", *GREEDY, "-p", "hi", "--system", "Be brief.")
    assert "Be brief." in prompts[3]


def test_a_full_context_names_the_ways_out(capsys):
    engine, ways_out = tiny_engine(), "(/clear begins anew; --ctx N makes room for more)"
    chat = Chat(engine, {"ignore_eos": True}, Wishes(None, {}))

    def n_prompt(n):
        return len(engine.encode(chat.wishes.render(engine, [{"role": "user", "content": " 7" * n}])))

    most = bisect.bisect_right(range(engine.n_ctx), engine.n_ctx - 8, key=n_prompt) - 1
    chat.answer(" 7" * most)
    assert f"cut: the context of {engine.n_ctx:,} tokens is full {ways_out}\n" in capsys.readouterr().err
    chat.answer("more")
    assert f"and the answer needs at least one more. {ways_out}\n" in capsys.readouterr().err
    code, out, err = run(capsys, "-m", MODEL, "--ctx", "128", "-p", "word " * 200)
    assert (code, out) == (2, "") and err.endswith("needs at least one more. (--ctx N makes room for more)\n")


def test_an_answer_that_was_cut_at_its_limit_has_room(capsys, loaded, monkeypatch):  # noqa: F811
    type_in(monkeypatch, "hi")
    err = run(capsys, *CHAT)[2]
    assert "is full" not in err and err.endswith("; cut at --max-tokens\n")
    type_in(monkeypatch, "hi")
    assert "cut" not in run(capsys, *(word for word in CHAT if word not in ("--max-tokens", "4")))[2]


def test_thinking_is_switched_within_a_conversation(capsys, loaded, monkeypatch):  # noqa: F811
    prompts = prompts_of(monkeypatch)
    type_in(monkeypatch, "/thinking", "/thinking off", "one", "/thinking on", "two", "/thinking maybe", "/thinking")
    code, _, err = run(capsys, *CHAT)
    assert code == 0 and ["</think>" in prompt.rsplit("assistant", 1)[1] for prompt in prompts] == [True, False]
    assert prompts[1].count("one") == 1                         # of the same conversation
    said = [line for line in err.splitlines() if "thinking" in line]
    assert said == ["thinking: as the template has it", "thinking: off", "thinking: on",
                    "qengine: /thinking takes on or off", "thinking: on"]


def test_a_system_message_needs_a_template(capsys, loaded, monkeypatch):  # noqa: F811
    model = dataclasses.replace(qengine.open_model(MODEL), template=None)
    monkeypatch.setattr(qengine, "open_model", lambda _: model)
    code, out, err = run(capsys, "-m", MODEL, "-p", "hi", "--system", "Be brief.")
    assert (code, out, err) == (2, "", "qengine: --system is for chat templates, and this model has none\n")


def test_the_prompt_comes_from_a_pipe(capsys, loaded, monkeypatch):  # noqa: F811
    prompts = prompts_of(monkeypatch)
    type_in(monkeypatch, "two", "lines")
    assert run(capsys, "-m", MODEL, "--max-tokens", "4", *GREEDY, "-p", "-", "--raw")[0] == 0
    assert prompts == ["two\nlines"]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_ways_to_leave(capsys, loaded, monkeypatch, word):  # noqa: F811
    prompts = prompts_of(monkeypatch)
    type_in(monkeypatch, "/?", word, "one")
    code, _, err = run(capsys, *CHAT)
    assert code == 0 and prompts == [] and err.count("list the commands") == 1 and "there is no" not in err


def test_a_conversation_is_taken_up_again(capsys, loaded, monkeypatch, tmp_path):  # noqa: F811
    """With its system message, in place of the present one."""
    prompts, path = prompts_of(monkeypatch), tmp_path / "said.json"
    type_in(monkeypatch, "one, \u00e9", f"/save {path}", "two")
    code, _, err = run(capsys, *CHAT, "--system", "Be brief.")
    assert code == 0 and f"saved as JSON: {path}, 2 messages\n" in err
    type_in(monkeypatch, "something else", f"/load {path}", "two")
    code, _, err = run(capsys, *CHAT)
    assert code == 0 and f"The conversation of {path}: 2 messages.\n" in err and prompts[3] == prompts[1]
    assert [message["role"] for message in json.loads(path.read_text())] == ["system", "user", "assistant"]


HELLO = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("messages", [
    {}, 5, "", "text", [5], ["role content"], [[]], [{}], [{"role": "user"}], [{"content": "hi"}],
    [HELLO | {"content": 5}], [HELLO | {"content": ["hi"]}], [HELLO | {"role": "tool"}], [HELLO | {"role": ["user"]}],
    [HELLO, HELLO | {"role": "system"}], [HELLO | {"reasoning_content": 5}]],
    ids=lambda messages: str(messages)[:40])
def test_what_is_no_conversation(messages):
    with pytest.raises(RequestError, match=r"^a.json holds no conversation: it is a JSON list, as /save NAME.json "):
        from_json(json.dumps(messages).encode(), "a.json")


def test_files_that_are_no_conversations(capsys):
    half = b'[{"role": "user", "content": "\\ud800"}]'
    for data in b"", b"# Markdown", b"\xff", b"[" * 100_000, b"[" + b"1" * 5_000 + b"]", half:
        with pytest.raises(RequestError, match="holds no conversation"):
            from_json(data, "a.json")
    with pytest.raises(RequestError, match="^a.json is longer than the 4.0 MB of a conversation$"):
        from_json(json.dumps([HELLO | {"content": "h" * (4 << 20)}]).encode(), "a.json")
    chat = Chat(tiny_engine(), {}, Wishes(None, {}), "Be brief.")
    chat.messages = before = [HELLO]
    for path in "/nowhere/a.json", "/dev/zero", "/dev", "":
        chat.obey("/load", path)
    assert chat.messages is before and chat.system == "Be brief." and capsys.readouterr().err.count("qengine: ") == 4


def test_conversations_that_cannot_be_saved(capsys, tmp_path):
    """Nothing is left of a file that the disk has no room for; what /load would refuse is not written."""
    chat = Chat(tiny_engine(), {}, Wishes(None, {}))
    chat.messages = [HELLO | {"content": "h" * (4 << 20)}]
    chat.obey("/save", str(tmp_path / "a.json"))
    assert "the conversation is longer than the 4.0 MB that /load takes" in capsys.readouterr().err
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        chat.obey("/save", str(tmp_path / "a.md"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)
    assert "File too large" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_empty_conversation_is_taken_up_again(tmp_path):
    chat, path = Chat(tiny_engine(), {}, Wishes(None, {})), str(tmp_path / "A.JSON")
    chat.obey("/save", path)
    chat.messages = [HELLO]
    chat.obey("/load", path)
    assert chat.messages == [] and chat.system is None


def test_a_picture_is_saved_as_words():
    picture = SimpleNamespace(pixels=SimpleNamespace(shape=(64, 96, 3)))
    messages = [{"role": "user", "content": [{"type": "image", "picture": picture}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "reasoning_content": "a", "content": "\u732b"}]
    assert from_json(as_json(messages).encode(), "a.json") == [
        {"role": "user", "content": "[picture: 96 x 64 pixels]\n\nWhat?"}, messages[1]]


def test_what_begins_like_a_command(capsys, loaded, monkeypatch):  # noqa: F811
    prompts = prompts_of(monkeypatch)
    type_in(monkeypatch, "/usr/bin is a folder", " /help me", "/nonsense", "/save", "/save /nowhere/a.md",
            "/save ~nobody.here/a.md", "/save a\0b")
    code, _, err = run(capsys, *CHAT)
    assert code == 0 and len(prompts) == 2 and "/usr/bin is" in prompts[0] and "/help me" in prompts[1]
    said = [line for line in err.splitlines() if line.startswith("qengine: ")]
    assert len(said) == 5 and "there is no /nonsense" in said[0] and "/save needs the name of a file" in said[1]
    assert said[2] == "qengine: /nowhere/a.md: No such file or directory"
    assert "~nobody.here" in said[3] and "/save needs the name of a file" in said[4]


def test_every_command_does_something_and_has_a_meaning():
    chat = Chat(tiny_engine(), {}, Wishes(None, {}))
    for name, command in COMMANDS.items():
        assert command.meaning and (name == "/exit" or callable(getattr(chat, command.work.__name__)))


def test_a_transcript():
    picture = SimpleNamespace(pixels=SimpleNamespace(shape=(64, 96, 3)))
    messages = [{"role": "user", "content": [{"type": "image", "picture": picture}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "reasoning_content": "a\n\nb", "content": "A cat."}]
    assert transcript(messages) == ("## user\n\n[picture: 96 x 64 pixels]\n\nWhat?\n\n"
                                    "## assistant\n\n> a\n>\n> b\n\nA cat.\n")


# ---- history -----------------------------------------------------------------------------------------------


def test_a_history_that_cannot_be_read_or_written(tmp_path):
    file = tmp_path / "history"
    assert read_history(file) == []
    file.write_text('"one"\nnonsense\n')
    assert read_history(file) == ["one"]
    append_history(file / "no folder", "text")
    (tmp_path / "new").mkdir()
    append_history(tmp_path / "new" / "history", "a\nb")
    append_history(tmp_path / "new" / "history", "c")
    assert read_history(tmp_path / "new" / "history") == ["a\nb", "c"]


def test_only_the_latest_lines_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "KEPT_LINES", 3)
    (tmp_path / "history").write_text("".join(f"{json.dumps(str(i))}\n" for i in range(10)))
    assert read_history(tmp_path / "history") == ["7", "8", "9"]


# ---- answers on a terminal ---------------------------------------------------------------------------------


def wrapped(text, columns, step):
    pieces = []
    lines = Wrapped(pieces.append, columns)
    for at in range(0, len(text), step):
        lines.push(text[at:at + step])
    lines.flush()
    return "".join(pieces)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text, expected", [
    ("one two three four", "one two\nthree four"), ("one  two\n\n three", "one  two\n\n three"),
    ("a wordthatistoolong b", "a\nwordthatistoolong\nb"), ("1234567890 1", "1234567890\n1"),
    ("```\na line of code\n```\none two three", "```\na line of code\n```\none two\nthree"),
    ("中文中文中文", "中文中文中\n文"), ("e\u0301\u0301\u0301\u0301 12345678", "e\u0301\u0301\u0301\u0301 12345678")])
def test_wrapped_words(text, expected, step):
    assert wrapped(text, 10, step) == expected


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, text, opening, colours):
    """What ShownAnswer writes of an answer, letter by letter."""
    out, tokenizer = Terminal(), ByteTokenizer(512)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(terminal, "has_colours", lambda stream: colours)
    answer = ShownAnswer(tokenizer, opening)
    ids = tokenizer.encode(text, allow_special=False)
    for i, (token, letter) in enumerate(zip(ids, text, strict=True)):
        answer.push(Delta(token, letter, "stop" if i + 1 == len(ids) else None))
    answer.end()
    return out.getvalue()


def test_thoughts_are_shown_as_such(monkeypatch):
    text = "<think>\nhm, well\n</think>\n\nYes."
    assert shown(monkeypatch, text, "either", True) == "\x1b[2m[thinking]\nhm, well\n[answer]\x1b[0m\nYes.\n"
    assert shown(monkeypatch, text, "either", False) == "[thinking]\nhm, well\n[answer]\nYes.\n"
    assert shown(monkeypatch, "hm\n</think>\n\nYes.", "thought", False) == "[thinking]\nhm\n[answer]\nYes.\n"
    assert shown(monkeypatch, "Yes, really.", "content", True) == "Yes, really.\n"
    assert shown(monkeypatch, "\x1b]52;c;eA==\x07", "content", True) == "\u241b]52;c;eA==\u2407\n"    # to no clipboard
    assert shown(monkeypatch, "still thinking", "thought", True) == "\x1b[2m[thinking]\nstill thinking\x1b[0m\n"


@pytest.mark.parametrize("text, opening, out, err", [
    ("hm\n</think>\n\nYes.", "thought", "Yes.\n", "hm\n"),
    ("<think>\nhm\n</think>\n\nYes.", "either", "Yes.\n", "hm\n"),
    ("Yes,\n</think>.", "content", "Yes,\n</think>.\n", ""), ("still thinking", "thought", "", "still thinking\n")])
def test_thoughts_go_beside_an_answer_in_a_file(capsys, text, opening, out, err):
    tokenizer = ByteTokenizer(512)
    answer = answer_writer(tokenizer, opening)
    ids = tokenizer.encode(text, allow_special=False)
    for i, (token, letter) in enumerate(zip(ids, text, strict=True)):
        answer.push(Delta(token, letter, "stop" if i + 1 == len(ids) else None))
    answer.end()
    assert tuple(capsys.readouterr()) == (out, err)


# ---- speeds ------------------------------------------------------------------------------------------------


def test_speeds_count_what_was_computed():
    generation = Answer(Request([1] * 1000))
    generation.n_cached, generation.n_generated = 960, 3
    generation.waited, generation.first_after, generation.last_after = 1.0, 3.0, 4.0
    assert speeds_of(generation) == ("prompt 1000 tokens (960 cached), 20.0 tokens/s; answer 3 tokens, 2.0 tokens/s")


def test_a_trace_is_told(capsys, loaded, tmp_path):  # noqa: F811
    file = tmp_path / "trace.json"
    assert run(capsys, "-m", MODEL, "-p", "hi", "--max-tokens", "4", *GREEDY, "--trace", str(file))[0] == 0
    code, _, err = run(capsys, "-m", MODEL, "-p", "hi", "--max-tokens", "4", *GREEDY, "--trace", str(file))
    n_bars = sum(event["ph"] == "X" for event in json.loads(file.read_text())["traceEvents"])
    assert f"trace: {file}, {n_bars:,} bars; open it in ui.perfetto.dev" in err
    steps, = re.findall(r"decode steps: (\d+) replays ran [\d,]+ operations: \d+ \w+", err)
    assert 1 <= int(steps) <= 8
