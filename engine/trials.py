"""Trials: before a grammar of a stranger is used, a process of its own tries it.

llguidance may take seconds and gigabytes for a grammar of 200 letters. Meanwhile some of its calls hold the
interpreter's lock, and a grammar that is nested too deeply ends the process. So `Trials` starts a small process, the
server of trials, which forks a child for each grammar. The child makes the calls with which an answer begins, under
limits of processor time, memory and stack, and says how they went. When the child ends, its memory is gone.

    this process                    server of trials                  a child
    Trials.verdict -- grammar --->  waits in a lane, is forked --->   try_grammar
                   <-- verdict ---  <-------------------------------  verdict, or it dies of a limit

There are two lanes. In the first, several children run at the same time, each for an instant, which is enough for
nearly every honest grammar. A grammar that needs more waits for its turn in the second lane, where it is tried again
with more time and memory. So a short trial never waits for a long one.

A sandbox (engine/sandbox.py) would not do: it is one process with one module, makes one call at a time, and starts anew
after each call that exceeds a limit. A fork has the vocabulary ready, and its end costs nothing.

The server runs this file as a program. It imports nothing of the house, and forks while it has one thread. Verdicts
travel as JSON: to unpickle what comes from a child, which a grammar may have broken, could run anything.
"""

import collections
import concurrent.futures
import contextlib
import gc
import hashlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark


class Lane(NamedTuple):
    """Limits of trials. n: at the same time. seconds: of processor time each. n_bytes: what each may take beside the
    memory of the server. niceness: as os.nice has it."""

    n: int
    seconds: float
    n_bytes: int
    niceness: int


LANES = Lane(4, 0.025, 16 << 20, 0), Lane(1, 0.5, 32 << 20, 5)
LOCK_SECONDS = 0.05         # most processor time of the first calls that hold the interpreter's lock
DEATHS = {                  # signal that ended a child -> why its grammar is refused
    signal.SIGPROF: "it takes too long to prepare", signal.SIGABRT: "it takes too much memory to prepare",
    signal.SIGSEGV: "it is nested too deeply"}
LOST = "the process that tries grammars has ended: try again"
KNOWN_VERDICTS = 1024

# What bounds the later steps of an answer. Fuel is llguidance's measure of a lexer's work: 30,000 of it take 15 ms at
# most, and schemas in daily use take up to 8,000 in a step. A state of a lexer takes 0.5 KB; a string of JSON whose
# length is limited makes 16 of them with each token. Items are the parser's: four for each optional property of an
# object.
LIMITS = llguidance.LLParserLimits(step_lexer_fuel=30_000, max_lexer_states=60_000, max_items_in_row=1_000,
                                   step_max_items=20_000, verbose_errors=False)


def prepared(words) -> llguidance.LLTokenizer:
    """llguidance's form of a vocabulary. words: tokens (bytes of each), special_token_ids, eos_ids, and called with a
    text its tokens."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=words.eos_ids)


# ---- this process --------------------------------------------------------------------------------------------


class Trials:
    """Asks the server of trials, which is started for the first grammar, and anew when it has ended."""

    def __init__(self):
        self.lock = threading.Lock()                # guards what follows
        self.connection = self.process = None       # the server of trials; None: it is to be started
        self.told = set()                           # numbers of the vocabularies that the server has
        self.asked, self.numbers = {}, itertools.count()
        self.gone = collections.deque()     # numbers of vocabularies that are asked for no more; to be told
        self.known = collections.OrderedDict()      # (number of the vocabulary, hash of the grammar) -> verdict

    def verdict(self, grammar: str, vocabulary=None) -> tuple[str | None, int]:
        """Why a grammar is refused, None if it is not; and the bytes that it takes. vocabulary: an object as `prepared`
        takes it, with a `number` of its own. Without one, only the grammar's form is looked at."""
        number = vocabulary and vocabulary.number
        key = number, hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self.lock:
            if key in self.known:
                self.known.move_to_end(key)
                return self.known[key]
        verdict = self._ask(grammar, "form" if vocabulary is None else number, vocabulary)
        with self.lock:
            if verdict[0] != LOST:
                self.known[key] = verdict
            if len(self.known) > KNOWN_VERDICTS:
                self.known.popitem(last=False)
        return verdict

    def lark_of(self, gbnf: str) -> tuple[str | None, str]:
        """Why a grammar in GBNF is refused, None if it is not; and the same in Lark's syntax. The converter is Python,
        takes quadratic time and recurses."""
        return self._ask(gbnf, "gbnf")

    def _ask(self, grammar: str, what, vocabulary=None) -> tuple:
        """What comes of a job; the second time where the server ended meanwhile."""
        return self._send(grammar, what, vocabulary) or self._send(grammar, what, vocabulary) or (LOST, 0)

    def _send(self, grammar: str, what, vocabulary):
        """What comes of a job; None where the server ended meanwhile. what: as Job has it."""
        answer, job = concurrent.futures.Future(), next(self.numbers)
        with self.lock, contextlib.suppress(OSError):
            self.connection = self.connection or self._start()
            self.asked[job] = answer
            while self.gone:
                self.connection.send(("forget", self.gone.popleft()))
            if vocabulary is not None and vocabulary.number not in self.told:
                self.told.add(vocabulary.number)
                self.connection.send(("learn", vocabulary.number, vocabulary.tokens, vocabulary.special_token_ids,
                                      vocabulary.eos_ids))
            self.connection.send(("try", job, what, grammar))
        return answer.result()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", os.path.abspath(__file__), str(theirs.fileno())]   # -P: engine/ is no path
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        pass_fds=[theirs.fileno()], start_new_session=True)     # no Ctrl-C for it
        theirs.close()
        connection = Connection(ours.detach())
        self.told = set()
        threading.Thread(target=self._listen, args=(connection, self.process), name="grammar trials",
                         daemon=True).start()
        return connection

    def _listen(self, connection: Connection, process: subprocess.Popen):
        """Hands out verdicts until the server has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                job, *result = json.loads(connection.recv_bytes())
                with self.lock:
                    answer = self.asked.pop(job)
                answer.set_result(tuple(result))
        process.wait()
        with self.lock:
            self.connection, lost, self.asked = None, self.asked, {}
        for answer in lost.values():
            answer.set_result(None)


TRIALS = Trials()           # one for all engines of the process


# ---- the server of trials ------------------------------------------------------------------------------------


class Job(NamedTuple):
    """what: the number of a vocabulary, under which the grammar is tried; "form", if only its form is looked at; or
    "gbnf", if it is turned into Lark's syntax."""

    number: int
    what: int | str
    grammar: str


class Words:
    """A vocabulary as it was sent."""

    bos_token_id = None

    def __init__(self, tokens, special_token_ids, eos_ids):
        self.tokens, self.special_token_ids, self.eos_ids = tokens, special_token_ids, eos_ids
        self.eos_token_id = eos_ids[0]
        self.prepared = prepared(weakref.proxy(self))

    def __call__(self, text: str) -> list[int]:
        return self.prepared.greedy_tokenize(text)


class Server:
    """Forks trials, and sends their verdicts."""

    def __init__(self, connection: Connection):
        self.connection, self.vocabularies = connection, {}
        self.waiting = [collections.deque() for _ in LANES]
        self.running = {}                   # pipe of a child -> (its job, number of the lane, id of the child)

    def run(self):
        """Serves until the other side of the connection has gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                for ready in wait([self.connection, *self.running]):
                    if ready is self.connection:
                        self._take(*ready.recv())
                    else:
                        self._finish(ready)
                for lane in range(len(LANES)):
                    self._start(lane)

    def _take(self, what: str, number: int, *rest):
        match what:
            case "learn":
                self.vocabularies[number] = Words(*rest)
            case "forget":
                self.vocabularies.pop(number, None)
            case "try":
                self.waiting[0].append(Job(number, *rest))

    def _start(self, lane: int):
        while self.waiting[lane] and sum(one == lane for _, one, _ in self.running.values()) < LANES[lane].n:
            job, (pipe, end) = self.waiting[lane].popleft(), Pipe(duplex=False)
            child = os.fork()
            if child == 0:
                run_child(LANES[lane], end, job, self.vocabularies)
            end.close()
            self.running[pipe] = job, lane, child

    def _finish(self, pipe: Connection):
        job, lane, child = self.running.pop(pipe)
        with contextlib.closing(pipe), contextlib.suppress(EOFError):
            self._tell(job, *json.loads(pipe.recv_bytes()))
            job = None
        _, status = os.waitpid(child, 0)
        if job and lane + 1 < len(LANES):
            self.waiting[lane + 1].append(job)
        elif job:
            self._tell(job, DEATHS.get(os.WTERMSIG(status), DEATHS[signal.SIGABRT]), 0)

    def _tell(self, job: Job, *result):
        self.connection.send_bytes(json.dumps([job.number, *result]).encode())


def run_child(lane: Lane, end: Connection, job: Job, vocabularies: dict[int, Words]):
    """A trial, in a process that ends with it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)        # llguidance's last words
    confine(lane)
    try:
        match job.what:
            case "form":
                result = fault_of_form(job.grammar), 0
            case "gbnf":
                result = None, gbnf_to_lark(job.grammar)
            case number:
                result = try_grammar(job.grammar, vocabularies[number].prepared)
    except MemoryError:
        os._exit(1)
    except BaseException as error:      # a panic of llguidance is a BaseException
        result = str(error) or type(error).__name__, 0
    end.send_bytes(json.dumps(result).encode())
    os._exit(0)


def confine(lane: Lane):
    """Sets the limits of this process. A stack is half of what threads have where the grammar will be used."""
    stack, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = 2 << 20 if stack == resource.RLIM_INFINITY else stack
    resource.setrlimit(resource.RLIMIT_STACK, (stack // 2, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory()[0] + lane.n_bytes,) * 2)
    os.nice(lane.niceness)
    signal.setitimer(signal.ITIMER_PROF, lane.seconds)


def memory() -> tuple[int, int]:
    """Bytes of this process: of all its addresses, and of the memory that is not of files."""
    with open("/proc/self/statm", encoding="ascii") as file:
        addresses, resident, shared = (int(pages) * resource.getpagesize() for pages in file.read().split()[:3])
    return addresses, resident - shared


def try_grammar(grammar: str, tokenizer: llguidance.LLTokenizer) -> tuple[str | None, int]:
    """The calls with which an answer begins."""
    before = memory()[1]
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    started = time.process_time()
    if not matcher.is_stopped() and (tokens := matcher.compute_ff_tokens()):
        matcher.consume_tokens(tokens)
    if time.process_time() - started > LOCK_SECONDS:
        return "its first step takes too long", 0
    matcher.compute_bitmask()
    return (matcher.get_error() if matcher.is_error() else None), memory()[1] - before


def fault_of_form(grammar: str) -> str | None:
    """What llguidance says against a grammar, None if nothing."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return messages[0] if failed else None


if __name__ == "__main__":
    gc.disable()            # it would write to memory that children share
    Server(Connection(int(sys.argv[1]))).run()
