"""The command line: what a person types, and what comes out on stdout, on stderr and as exit code."""

import gc
import http.client
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import qengine
from cli import interrupts
from cli import serve as server
from cli.main import main
from cli.options import EXAMPLES, LLAMA_CPP, build_parser
from engine import limits
from engine.plan import LONGEST_CTX
from engine.request import Delta, EngineStopped, Generation
from kernels.emulated.card import EmulatedCard
from tests.tiny import CONTEXT, MODEL, ROOT, tiny_engine
from tests.until import PATIENCE

GREEDY = ["--temperature", "0"]
PLAIN = ["--thinking", "off"]         # the answer is no thought, which would go to stderr


@pytest.fixture
def loaded(monkeypatch):
    """main() uses the shared engine instead of loading a second one."""
    engine = tiny_engine()
    monkeypatch.setattr(qengine, "load", lambda *args, **options: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    return engine


@pytest.fixture(scope="module", autouse=True)
def not_under_nohup():
    """Under nohup the tests' process ignores SIGHUP, and a process that it starts would do the same."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(*arguments, ctx=CONTEXT, stdin=subprocess.PIPE, model=("-m", MODEL)):
    """The command line as a process of its own, on the emulated card, with pipes."""
    command = [sys.executable, str(ROOT / "qengine.py"), *model, "--card", "emulated", *arguments]
    command += ["--ctx", str(ctx)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True)


def run(capsys, *arguments):
    """main() with these arguments; gives (exit code, stdout, stderr)."""
    capsys.readouterr()
    try:
        code = main(list(arguments))
    except SystemExit as leave:         # argparse leaves by this
        code = leave.code
    out, err = capsys.readouterr()
    return code, out, err


# ---- help and mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["-m", MODEL], ["--temperature", "1"]], ids=str)
def test_nothing_to_do_and_nobody_to_talk_with(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("qengine: say what to do: -p, --chat, --serve,")


def test_help(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for option in ("m", "p", "-chat", "-serve", "-print-config", "-max-tokens", "-temperature", "-top-k",
                   "-top-p", "-min-p", "-seed", "-repetition-penalty", "-frequency-penalty", "-presence-penalty",
                   "-thinking", "-raw", "-card", "-ctx", "-slots", "-host", "-perplexity", "-against", "-bench",
                   "-probe", "-plan", "-split", "-prompt-lengths", "-contexts", "-repeats", "-batch", "-json",
                   "-embedding-model", "-embedding-card", "-reranking-model", "-reranking-card", "-image", "-mmproj",
                   "-image-tokens", "-system", "-version"):
        assert f" -{option} " in out
    assert out.startswith("usage: python qengine.py [-m MODEL] ") and out.count("  python qengine.py") == 13
    assert max(map(len, out.splitlines())) <= 110


HELPLESS = """
import runpy, sys
sys.argv = ["qengine.py", {option!r}]
try:
    runpy.run_path({path!r}, run_name="__main__")
except SystemExit:
    print([name for name in ("numba", "numpy", "PIL", "jinja2", "tqdm", "flask") if name in sys.modules])
"""


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_is_there_at_once(option):
    """It waits for no library; numba alone takes a second to import."""
    code = HELPLESS.format(option=option, path=str(ROOT / "qengine.py"))
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert told.stdout.splitlines()[-1] == "[]" and told.stderr == ""


UNKEPT = """
import sys, warnings, kernels.compile as compiler, cli.main as main
def twice():
    for _ in range(2):
        with warnings.catch_warnings():         # as the compiler does; Python forgets then what it has shown
            pass
        compiler.store(sys.argv[1] + "/ptx/kernel", b"")
    return 0
main.main = twice
main.run_process()
"""


def test_a_cache_that_cannot_be_written_is_told_of_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    code = [UNKEPT, str(tmp_path / "file")]
    told = subprocess.run([sys.executable, "-c", *code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == 0
    assert re.fullmatch(r"warning: compiled kernel not kept in \S+/file/ptx: .*Not a directory.*\n", told.stderr)


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"qengine {limits.VERSION}\n", "")


def test_examples_in_the_help_parse():
    for line in EXAMPLES.splitlines()[1:]:
        command = line.split("qengine.py ")[1].partition("   ")[0]
        build_parser().parse_args(command.replace('"', "").split())


@pytest.mark.parametrize("arguments, words", [
    (["-m", MODEL, "-p", "hi", "--chat"], "--chat"),
    (["-m", MODEL, "-p", "hi", "--max-tokens", "0"], "--max-tokens"),
    (["-m", MODEL, "-p", "hi", "--max-tokens", "many"], "--max-tokens"),
    (["-m", MODEL, "-p", "hi", "--temperature", "-1"], "--temperature"),
    (["-m", MODEL, "-p", "hi", "--temperature", "nan"], "--temperature"),
    (["-m", MODEL, "-p", "hi", "--top-p", "1.5"], "--top-p"),
    (["-m", MODEL, "-p", "hi", "--repetition-penalty", "0"], "--repetition-penalty"),
    (["-m", MODEL, "-p", "hi", "--presence-penalty", "-2.5"], "--presence-penalty"),
    (["-m", MODEL, "-p", "hi", "--thinking", "maybe"], "--thinking"),
    (["-m", MODEL, "-p", "hi", "--nonsense"], "--nonsense"),
    (["-m", MODEL, "--serve", "99999"], "--serve"),
    (["-m", MODEL, "--chat", "--raw"], "--raw goes with -p"),
    (["-m", MODEL, "-p", "hi", "--raw", "--thinking", "on"], "--thinking"),
    (["-m", MODEL, "-p", "hi", "--slots", "2"], "--slots goes with --serve"),
    (["-m", MODEL, "--chat", "--host", "0.0.0.0"], "--host goes with --serve"),
    (["-m", MODEL, "--chat", "--kv-tokens", "9000"], "--kv-tokens goes with --serve"),
    (["-m", MODEL, "-p", "hi", "--checkpoint-memory", "9"], "--checkpoint-memory goes with --serve or --chat"),
    (["-m", MODEL, "--chat", "--checkpoint-host-memory", "-1"], "--checkpoint-host-memory"),
    (["-m", MODEL, "-p", "hi", "--against", MODEL], "--against goes with --perplexity"),
    (["-m", MODEL, "--print-config", "--seed", "1"], "--seed goes with -p or --chat or --serve"),
    (["-m", MODEL, "--perplexity", __file__, "--temperature", "1"], "--temperature"),
    (["-m", "", "-p", "hi"], "-m names no model"),
    (["-m", MODEL, "-p", "hi", "--temp", "1"], "--temp is an option of llama.cpp: say --temperature"),
    (["-m", MODEL, "--chat", "-ngl", "99"],
     "-ngl is an option of llama.cpp: leave it out, all layers are on the cards"),
    (["-m", MODEL, "--chat", "--no-mmap"], "--no-mmap is an option of llama.cpp: leave it out"),
    (["-m", MODEL, "--serve", "--jinja"], "--jinja is an option of llama.cpp: leave it out"),
    (["-m", MODEL, "-p", "hi", "-sm", "layer"], "-sm is an option of llama.cpp: leave it out"),
    (["-m", MODEL, "-i"], "-i is an option of llama.cpp: say --chat"),
    (["-m", MODEL, "--color"], "--color is an option of llama.cpp: leave it out, a terminal gets colours"),
    (["-m", MODEL, "-p", "hi", "-md", "d.gguf"], "-md is an option of llama.cpp: leave it out, drafts need no model"),
    (["-m", MODEL, "-p", "hi", "--reasoning-budget", "0"], "say --thinking-budget, or --thinking off"),
    (["-m", MODEL, "-p", "hi", "-ot", "exps=CPU"], "leave it out, experts for which cards lack memory"),
    (["-m", MODEL, "--plan", "--memory", "16G"], "--memory: must be a number, as in 15.5, not '16G'"),
    (["-m", MODEL, "--plan", "--ctx", "128k"], "--ctx: must be a whole number, as in 16384, not '128k'"),
    (["-hf", "OWNER/NAME"], "-hf is an option of llama.cpp: say -m hf:OWNER/NAME"),
    (["-m", MODEL, "--serve", "--ctx-size=512"], "say --ctx (see"),
    (["-m", "synthetic:enormous", "-p", "hi"], "enormous"),
    (["-m", "synthetic:27b:q4_k+mtp", "--plan"], "; +mtp goes with the size: synthetic:9b+mtp:q4_k"),
    (["-m", "synthetic:enormous", "--print-config"], "enormous"),
    (["-m", "/nowhere/model.gguf", "-p", "hi"], "/nowhere/model.gguf"),
    (["-m", "/", "-p", "hi"], "/"),
    (["-m", __file__, "-p", "hi"], "test_cli.py"),
    (["-m", __file__, "--serve", "0"], "test_cli.py"),
    (["-m", MODEL, "-p", "hi", "--card", "abacus"], "abacus"),
    (["-m", MODEL, "-p", "hi", "--card", "emulated:5"], "5 cards are too many"),
    (["-m", MODEL, "--plan", "--card", "emulated:2", "--split", "1,2"], "split must be 2 numbers"),
    (["-m", MODEL, "-p", "hi", "--card", "emulated:v90"], "emulated:v90"),
    (["--print-config", "--trace", "x"], "--trace goes with -p"),
    (["-m", MODEL, "--bench", "--cards", "2,1", "--split", "2,2"], "--split names the layers of each card"),
    (["-m", MODEL, "-p", "\udcff"], "UTF-8"),
], ids=str)
def test_a_mistake_is_one_sentence(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    *before, sentence = err.splitlines()
    assert sentence.startswith("qengine: ") and words in sentence
    assert "Traceback" not in err and not any("qengine: " in line for line in before)


def test_options_of_others_are_not_ours():
    """No name in the list of llama.cpp's options is an option of ours, and each hint names an option that exists."""
    ours = {name for action in build_parser()._actions for name in action.option_strings}
    assert LLAMA_CPP and not LLAMA_CPP.keys() & ours
    assert {word for said in LLAMA_CPP.values() for word in re.findall(r"say (-[\w-]+)", said)} <= ours


@pytest.mark.parametrize("task", [["--plan"], ["-p", "hi"]])
def test_what_does_not_fit_is_shown_with_a_way_out(capsys, task):
    code, out, err = run(capsys, "-m", MODEL, *task, "--card", "emulated", "--ctx", str(LONGEST_CTX))
    assert (code, out) == (2, "")
    first, head, card, way_out = err.splitlines()
    assert first == f"qengine: {MODEL} does not fit:" and head.startswith("card") and card.endswith(" too much")
    fitting = int(way_out.removeprefix("it would with --ctx "))
    for n_ctx, expected in (fitting, 0), (fitting + 64, 2):
        assert run(capsys, "-m", MODEL, "--plan", "--card", "emulated", "--ctx", str(n_ctx))[0] == expected


@pytest.mark.parametrize("arguments, words", [
    (["-p", "long " * CONTEXT], str(CONTEXT)),
    (["-p", "long " * CONTEXT, "--raw"], str(CONTEXT)),
    (["-p", "", "--raw"], "empty"),
    (["-p", " \n"], "the prompt is empty"),
    (["-p", "-"], "the prompt is empty"),
], ids=["chat", "raw", "empty", "blank", "pipe"])
def test_a_prompt_that_cannot_be_answered_is_refused_before_the_load(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(qengine, "load", lambda *_, **__: pytest.fail("was loaded"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    code, out, err = run(capsys, "-m", MODEL, "--ctx", str(CONTEXT), *arguments)
    assert (code, out) == (2, "") and err.startswith("qengine: ") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("task, option", [(["-p", "hi"], "--trace"), (["--bench"], "--trace"), (["--bench"], "--json"),
                                          (["--serve", "0"], "--trace"), (["--probe"], "--json")], ids=str)
def test_a_file_for_results_that_cannot_be_written_is_named_before_the_work(capsys, monkeypatch, tmp_path, task,
                                                                            option):
    for name in "qengine.load", "kernels.probe.probe_cards":
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("was begun"))
    code, out, err = run(capsys, *task, option, str(tmp_path / "nowhere" / "a.json"))
    assert (code, out) == (2, "") and err == f"qengine: {option} {tmp_path}/nowhere/a.json: No such file or directory\n"


def test_a_mistake_leaves_what_an_earlier_run_wrote(capsys, tmp_path):
    (file := tmp_path / "bench.json").write_text("results")
    assert run(capsys, "--bench", "-m", "/nowhere/model.gguf", "--json", str(file))[0] == 2
    assert file.read_text() == "results"


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "-m", MODEL, "--serve", str(port))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and str(port) in err and "in use" in err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 64 + ".example"])
def test_a_host_that_is_not_ours(capsys, host):
    code, out, err = run(capsys, "-m", MODEL, "--serve", "0", "--host", host)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.endswith(" (--host takes an address of this machine)\n")


# ---- the model that comes along ----------------------------------------------------------------------------


def test_no_model_is_the_model_that_comes_along(capsys):
    engine = qengine.load(card="emulated", progress=False)
    ids = engine.tokenizer.encode(engine.template.render([{"role": "user", "content": "hi"}]))
    answer = engine.generate(ids, max_tokens=8)
    engine.close()
    code, out, err = run(capsys, "-p", "hi", "--max-tokens", "8", "--card", "emulated")
    assert (code, out) == (0, answer + "\n") and f"model: {engine.name}, " in err


@pytest.mark.parametrize("progress", [True, False])
def test_where_no_bar_is_drawn_a_line_tells_of_compiling(capsys, monkeypatch, progress):
    """A first start takes minutes; who has only a log sees why."""
    monkeypatch.setattr(EmulatedCard, "compile_kernels",
                        lambda card, needed, on_done, tell: tell and tell("compiling 9 kernels"))
    qengine.load(MODEL, card="emulated", ctx=CONTEXT, progress=progress).close()
    assert ("compiling 9 kernels\n" in capsys.readouterr().err) == progress


def test_no_arguments_at_a_terminal_are_a_chat():
    terminal, its_end = pty.openpty()
    with start("--max-tokens", "4", stdin=its_end, model=[]) as process:
        os.close(its_end)
        read_until(process.stdout, "> ")
        os.write(terminal, b"hello\n")
        read_until(process.stdout, "> ")
        os.write(terminal, b"\x04")
        err = process.stderr.read()
    os.close(terminal)
    assert process.returncode == 0 and "Ctrl-D leaves" in err and "answer " in err


@pytest.mark.parametrize("arguments", [["-p", "hi"], ["--serve", "0"], ["--print-config"]], ids=str)
def test_the_model_that_comes_along_is_missing(capsys, monkeypatch, tmp_path, arguments):
    for module in qengine, limits:
        monkeypatch.setattr(module, "DEFAULT_MODEL", tmp_path / "small.gguf")
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("qengine: ") and "small.gguf: the model that comes with qengine is not there" in err


# ---- answers -----------------------------------------------------------------------------------------------


def test_print_config(capsys):
    code, out, err = run(capsys, "-m", MODEL, "--print-config")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert f"n_vocab = {tiny_engine().config.n_vocab}" in lines
    assert lines[-3:] == [f"ctx = {qengine.DEFAULT_CTX}", "slots = 1",
                          "card = the first if the model fits there, or else all"]
    said = ["--ctx", "5000", "--slots", "3", "--card", "emulated"]
    assert run(capsys, "-m", MODEL, "--print-config", *said) == (
        0, "\n".join(lines[:-3] + ["ctx = 5000", "slots = 3", "card = emulated", ""]), "")


def test_prompt(capsys, loaded):
    first = run(capsys, "-m", MODEL, "-p", "hi", *PLAIN, "--max-tokens", "8", *GREEDY)
    code, out, err = first
    assert code == 0 and out.endswith("\n") and len(out) > 1
    assert "answer 8 tokens" in err and err.count("tokens/s") == 2
    assert run(capsys, "-m", MODEL, "-p", "hi", *PLAIN, "--max-tokens", "8", *GREEDY)[:2] == first[:2]


@pytest.mark.parametrize("options", [[], ["--raw"], ["--thinking", "on"], ["--thinking", "off"]], ids=str)
def test_what_the_model_is_given(capsys, loaded, options):
    _, out, err = run(capsys, "-m", MODEL, "-p", "hi", "--max-tokens", "4", *GREEDY, *options)
    thinking = {"on": True, "off": False}.get((options or [None])[-1])
    rendered = loaded.template.render([{"role": "user", "content": "hi"}], enable_thinking=thinking)
    ids = loaded.tokenizer.encode("hi" if options == ["--raw"] else rendered)
    assert f"prompt {len(ids)} tokens" in err
    answer = loaded.generate(ids, max_tokens=4, temperature=0.0)
    if options in ([], ["--thinking", "on"]):       # all that has come is a thought
        assert out == "" and f"{answer.strip()}\n" in err
    else:
        assert out == answer + "\n"


def test_penalties(capsys, loaded):
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": -0.5}
    options = [word for name, value in penalties.items() for word in ("--" + name.replace("_", "-"), str(value))]
    out = run(capsys, "-m", MODEL, "-p", "hi", "--raw", "--max-tokens", "16", *GREEDY, *options)[1]
    plain, penalized = (loaded.generate("hi", max_tokens=16, **fields) + "\n" for fields in ({}, penalties))
    assert out == penalized != plain


@pytest.mark.parametrize("arguments", [("-p", "hi"), ("--chat",)], ids=str)
def test_a_card_that_fails_while_it_answers(capsys, loaded, monkeypatch, arguments):
    class Failing(Generation):
        def listen(self, patience=None):
            yield Delta(1, "text so far")
            raise EngineStopped("the engine has stopped: the card fell off the bus")

    monkeypatch.setattr(loaded, "submit", lambda request: Failing(request, loaded.tokenizer))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\nagain\n"), encoding="utf-8"))
    assert run(capsys, "-m", MODEL, *PLAIN, *arguments) == (
        1, "text so far\n", "qengine: the engine has stopped: the card fell off the bus\n")


def test_chat_keeps_the_conversation(capsys, loaded, monkeypatch):
    lines = b"hello\n\nand then?\n\xff\n" + b"long " * CONTEXT + b"\nlast\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    code, out, err = run(capsys, "-m", MODEL, "--chat", *PLAIN, "--max-tokens", "6", *GREEDY)
    assert code == 0
    assert err.count("answer 6 tokens") == 3 and err.count("qengine: ") == 2 and "UTF-8" in err

    messages, expected = [], ""
    for text in ("hello", "and then?", "last"):     # what was refused is no part of the conversation
        messages.append({"role": "user", "content": text})
        ids = loaded.tokenizer.encode(loaded.template.render(messages, enable_thinking=False))
        answer = loaded.generate(ids, max_tokens=6, temperature=0.0)
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert out == expected


# ---- as a process ------------------------------------------------------------------------------------------


def test_prompt_as_a_process():
    process = start("-p", "hi", *PLAIN, "--max-tokens", "4")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and out.endswith("\n")
    first, *_, last = err.splitlines()
    assert first.startswith("card: emulated card 0 on ") and "answer 4 tokens" in last
    assert re.search(r"model: synthetic:tiny, 3\.9 million parameters; [\d.]+ MB on the card, 1 x 2,048 tokens", err)


def test_a_reader_that_leaves():
    with start("-p", "hi", *PLAIN, "--max-tokens", "400") as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(PATIENCE) == 1
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("seconds", [0, 0.3, 0.8, 1.6, 2.8])
def test_ctrl_c_before_the_answer(seconds):
    """While Python imports, the model loads, kernels compile, the prompt runs."""
    process = start("-p", "long " * 19_000, "--raw", ctx=100_000)       # the prompt takes longer than any of the waits
    while "/numpy/" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)        # Python may not have read our first line yet
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.parametrize("pause", [0, 0.003, 0.03])
def test_ctrl_c_again_and_again(pause):
    process = start("-p", "hi", *PLAIN)
    process.stdout.read(1)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in err and "KeyboardInterrupt" not in err


@pytest.mark.parametrize("arguments, redirected, code", [
    (["-p", "hi", "--max-tokens", "4"], ">&-", 0),
    (["--chat"], "<&-", 0),
    (["-p", "hi", "--max-tokens", "4"], "2>&-", 0),
    (["-p", "hi", *PLAIN, "--max-tokens", "4"], ">/dev/full", 1),
    (["--print-config"], ">/dev/full", 1),
], ids=str)
def test_streams_that_are_closed_or_full(arguments, redirected, code):
    command = [sys.executable, str(ROOT / "qengine.py"), "-m", MODEL, "--card", "emulated", *arguments]
    done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", *command], capture_output=True, text=True,
                          timeout=PATIENCE)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert ("No space left" in done.stderr) == (code == 1) and "card: " not in done.stdout


def test_ctrl_c():
    process = start("-p", "hi", *PLAIN)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "answer " in err and "Traceback" not in err


def test_ctrl_c_in_a_chat_ends_the_answer_only():
    process = start("--chat", *PLAIN)
    process.stdin.write("hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)        # closes stdin, as Ctrl-D does
    assert process.returncode == 0 and "answer " in err and "Traceback" not in err


def test_ctrl_c_at_the_prompt_of_a_chat_keeps_the_conversation():
    terminal, its_end = pty.openpty()
    with start("--chat", "--max-tokens", "4", stdin=its_end) as process:
        os.close(its_end)
        read_until(process.stdout, "> ")
        err = ""
        for said in b"hello\n", b"and then?\n":
            time.sleep(0.3)                         # it writes its prompt before it reads
            process.send_signal(signal.SIGINT)
            err += read_until(process.stderr, "\nCtrl-D leaves.\n")
            os.write(terminal, said)
            read_until(process.stdout, "> ")        # the prompt again, after the interruption ...
            read_until(process.stdout, "> ")        # ... and after the answer
        os.write(terminal, b"\x04")
        err += process.stderr.read()
    os.close(terminal)
    assert process.returncode == 0 and "Traceback" not in err
    first, second = (int(n) for n in re.findall(r"prompt (\d+) tokens", err))
    assert second > 2 * first                       # the first question is part of the second prompt


def read_until(stream, end):
    text = ""
    while not text.endswith(end):
        text += stream.read(1) or pytest.fail(f"ended after {text!r}")
    return text


def serve(*arguments, ctx=CONTEXT):
    """A server as a process, its address, and a stream of so many tokens as its context holds, which has begun."""
    process = start("--serve", "0", *arguments, ctx=ctx)
    line = next(line for line in process.stderr if line.startswith("serving "))
    address = next(word for word in line.split() if word.startswith("http")).split("/")[2]
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["status"] == "ok"

    body = {"prompt": "hi", "max_tokens": ctx - 100, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    stream = connection.getresponse()
    stream.readline()
    return process, address, stream


@pytest.mark.parametrize("signals, arguments, code", [
    ([signal.SIGINT], [], 130), ([signal.SIGTERM], ["--drain", "0.2"], 0),
    ([signal.SIGHUP, signal.SIGTERM], [], 0)], ids=["Ctrl-C", "drained", "second"])
def test_the_end_of_a_server_tells_its_clients(signals, arguments, code):
    """At once at Ctrl-C and at a second signal, and otherwise after --drain."""
    process, _, stream = serve(*arguments, ctx=20_000)
    process.send_signal(signals[0])
    said = ""
    while signals[0] != signal.SIGINT and "draining: 1 running" not in said:
        said += process.stderr.readline() or pytest.fail(f"ended after {said!r}")
    for number in signals[1:]:
        process.send_signal(number)
    assert b"cancelled" in stream.read()            # told, not cut off
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, "") and "Traceback" not in said + err
    assert "draining" not in err


def test_what_lives_as_long_as_an_engine_is_left_out_of_collections(monkeypatch):
    """From the first moment on, and again when a server has gone on with another engine; not when it has failed."""
    frozen, engines = [], [None, None]
    gc.unfreeze()                                   # of former files

    def join():                                     # an engine has failed
        frozen.append(gc.get_freeze_count())
        engines.pop()

    service = SimpleNamespace(engine=SimpleNamespace(scheduler=SimpleNamespace(thread=SimpleNamespace(join=join)),
                                                     reason="it has failed"))
    monkeypatch.setattr(server, "go_on", lambda service, options: bool(engines))
    monkeypatch.setattr(server, "time", SimpleNamespace(
        sleep=lambda seconds: frozen.append(gc.get_freeze_count()) or sys.exit()))
    with pytest.raises(SystemExit):
        server.work(service, SimpleNamespace(go_on=True))
    *while_working, after = frozen
    assert len(while_working) == 2 and min(while_working) > 10_000 and after == 0


def test_a_server_that_is_told_to_end_lets_requests_go_on():
    process, address, stream = serve("--drain", str(PATIENCE))
    process.terminate()
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    status = 200
    while status == 200:                            # the signal takes a moment
        connection.request("GET", "/health")
        answer = connection.getresponse()
        status, said = answer.status, json.load(answer)
    assert (status, said) == (503, {"status": "draining"})
    text = stream.read()
    assert b'"length"' in text and text.endswith(b"[DONE]\n\n") and b"cancelled" not in text
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in err


def test_a_server_that_is_told_to_end_while_it_loads():
    process = start("--serve", "0")
    assert process.stderr.readline().startswith("card: ")
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in err and "serving" not in err


def test_what_is_ignored_stays_ignored():
    """Under nohup SIGHUP is."""
    before = [signal.signal(number, signal.SIG_IGN) for number in interrupts.ENDING]
    try:
        interrupts.endable()
        assert [signal.getsignal(number) for number in interrupts.ENDING] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in zip(interrupts.ENDING, before):
            signal.signal(number, handler)
