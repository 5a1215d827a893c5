"""Grammars are tried in a process of their own (engine/trials.py), which stops nobody here and keeps nothing."""

import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from engine import constraints
from engine.constraints import LARGE, LARGE_BYTES, Constraint, Vocabulary
from engine.request import RequestError
from engine.tokenizer import OneAtATime
from engine.trials import DEATHS, LOST, TRIALS, Trials, memory
from tests.hostile import AT_ONCE, LATER, bomb, grammar_of
from tests.longest_wait import LongestWait
from tests.scripted import shipped


@pytest.fixture(scope="module")
def vocabulary():
    made = Vocabulary(shipped().tokenizer)
    made.compile("start: /a/")              # the server of trials is up
    return made


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_hostile_grammar_is_refused_and_stops_nobody(vocabulary, name):
    before = memory()[1]
    with LongestWait() as wait, pytest.raises(RequestError) as caught:
        Constraint(vocabulary, AT_ONCE[name])
    assert caught.value.field == "grammar" and len(str(caught.value)) < 1100
    assert wait.work < 0.6           # it takes 0.01 s; "nested repetitions" used to take 0.9 to 2.8 s
    assert memory()[1] - before < 20 << 20 and AT_ONCE[name] not in vocabulary.kept


@pytest.mark.parametrize("name", LATER)
def test_a_grammar_that_is_hostile_later_stops_nobody(vocabulary, name):
    """Each step has its limits, and a failed grammar is not kept."""
    with LongestWait() as wait:
        constraint, rng = Constraint(vocabulary, LATER[name]), random.Random(0)
        for _ in range(100):
            if constraint.error or constraint.ended:
                break
            mask = np.unpackbits(np.frombuffer(constraint.matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = sorted(set(np.flatnonzero(mask[:len(vocabulary.tokens)])) - set(vocabulary.eos_ids))
            constraint.take(int(constraint.forced[0] if constraint.forced else rng.choice(allowed)))
    assert wait.work < 1             # 0.04 s
    assert (LATER[name] in vocabulary.kept) == (constraint.error is None)


def test_a_short_trial_does_not_wait_for_long_ones(vocabulary):
    """While a few long trials take turns, many short ones are done."""
    long = [threading.Thread(target=TRIALS.verdict, args=(grammar_of(bomb(n)), vocabulary)) for n in range(1, 13)]
    for thread in long:
        thread.start()
    for n in range(10):
        assert TRIALS.verdict(f"start: /a{n}/", vocabulary)[0] is None
    assert any(thread.is_alive() for thread in long)
    for thread in long:
        thread.join()


def test_memory_comes_back(vocabulary):
    """It was 150 MB for each such schema."""
    before = memory()[1]
    for n in range(100, 110):
        with pytest.raises(RequestError, match="takes too"):
            vocabulary.compile(grammar_of(bomb(n)))
    gc.collect()
    assert memory()[1] - before < 20 << 20
    assert sum(one.size for one in vocabulary.kept.values()) < 64 << 20


def test_gbnf_is_converted_where_it_stops_nobody():
    """A chain of rules, whose conversion takes seconds."""
    chain = "".join(f"a{i} ::= a{i + 1}\n" for i in range(4000))
    with LongestWait() as wait:
        assert TRIALS.lark_of(f'root ::= a0\n{chain}a4000 ::= "x"')[0] in DEATHS.values()
    assert wait.work < 0.6
    assert TRIALS.lark_of('root ::= "x"')[1].endswith('start: "x"\n')


# A server of trials whose one lane has much time and as many bytes as its second argument says.
SERVER = """
import sys
from multiprocessing.connection import Connection
from engine import trials
trials.LANES = trials.Lane(1, 60.0, int(sys.argv[2]), 0),
trials.Server(Connection(int(sys.argv[1]))).run()
"""


@pytest.mark.parametrize("n_bytes, reason", [(1 << 20, DEATHS[signal.SIGABRT]), (1 << 30, None)])
def test_a_trial_is_limited_in_memory(n_bytes, reason):
    """Of a grammar that takes several megabytes."""
    ours, theirs = Pipe()
    with ours, theirs:
        server = subprocess.Popen([sys.executable, "-c", SERVER, str(theirs.fileno()), str(n_bytes)],
                                  pass_fds=[theirs.fileno()])
        theirs.close()
        ours.send(("try", 7, "form", "start: /" + "|".join(f"{n}kkkkkkkk" for n in range(14_000)) + "/"))
        assert json.loads(ours.recv_bytes()) == [7, reason, 0]
    assert server.wait() == 0


def test_large_grammars_in_use_are_bounded(vocabulary, monkeypatch):
    """Small ones are not affected."""
    monkeypatch.setattr(TRIALS, "verdict", lambda grammar, words=None: (None, sizes[grammar]))
    sizes = {f"start: /{letter}/": LARGE_BYTES // 4 - 1000 for letter in "abcde"} | {"start: /small/": LARGE // 2}
    fresh = Vocabulary(shipped().tokenizer)
    large = [grammar for grammar in sizes if "small" not in grammar]
    answers = [Constraint(fresh, grammar) for grammar in large[:4]]
    with pytest.raises(RequestError, match="try again"):
        Constraint(fresh, large[4])
    Constraint(fresh, "start: /small/")
    del answers[0]
    assert Constraint(fresh, large[4]).error is None


def test_large_grammars_are_compiled_one_at_a_time(vocabulary, monkeypatch):
    """Free memory goes back after each. Eight clients with lists of 14,000 texts took 400 MB that stayed."""
    compiling, most, trimmed = [], [], []

    def compile_slowly(prepared, grammar):
        compiling.append(grammar)
        time.sleep(0.05)
        most.append(len(compiling))
        compiling.remove(grammar)

    monkeypatch.setattr(constraints, "compile_grammar", compile_slowly)
    leave = OneAtATime.__exit__
    monkeypatch.setattr(OneAtATime, "__exit__", lambda self, *why: trimmed.append(leave(self, *why)))
    for n_bytes, n_turns in ((LARGE + 1, 4), (LARGE, 0)):
        monkeypatch.setattr(TRIALS, "verdict", lambda grammar, words=None: (None, n_bytes))
        threads = [threading.Thread(target=vocabulary.compile, args=(f"{n_bytes} {n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(trimmed) == n_turns and (n_turns == 0 or max(most) == 1)
        trimmed.clear()
        vocabulary.kept.clear()


def test_a_verdict_is_kept_and_a_lost_server_is_replaced(monkeypatch):
    trials = Trials()
    assert trials.verdict("start: /a/") == (None, 0) == trials.verdict("start: /a/")
    asked, ask = [], trials._send
    monkeypatch.setattr(trials, "_send", lambda *arguments: asked.append(arguments) or ask(*arguments))
    assert trials.verdict("start: /a/") == (None, 0) and asked == []
    trials.process.kill()
    assert trials.verdict("start: /b/") == (None, 0)
    monkeypatch.setattr(trials, "_send", lambda *arguments: None)
    assert trials.verdict("start: /c/") == (LOST, 0)
    monkeypatch.setattr(trials, "_send", ask)
    assert trials.verdict("start: /c/") == (None, 0)        # that there was no process is not kept
