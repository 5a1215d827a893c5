"""What replicas on Ray cost and win: `python -m benchmarks.replicas overhead | nodes | affinity | soak | front`.

    overhead    first token and streamed tokens/s of one replica against the engine in the server's own process, in turn
    nodes       tokens/s of two replicas on two nodes against one, of engines that only wait or, with --engine emulated,
                of the model that ships; and what held the processors meanwhile
    affinity    conversations of three turns over three replicas: cached tokens against one replica with three times the
                memory
    soak        clients, and a replica killed now and then: every answer is the one given alone, and none is lost, as
                each has a seed and can be repeated; of one that is lost all the same it says which replicas it had, and
                what was seen of them
    front       how many streamed tokens/s a front hands on, of engines that only write

All nodes are on this machine, so they share its processors. `--json FILE` writes the figures, too. The exit code is 1
where a goal is missed that does not depend on what else this machine does: in `affinity` and `soak`.
"""

import argparse
import contextlib
import http.client
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import qengine
from api.http import serving
from api.service import create_app
from cli.ending import run_program
from cli.models import load_models, open_models
from cli.options import build_parser, check_options
from cli.serve import free
from engine.details import ModelDetails
from engine.request import Generation, Request
from engine.served import Facts
from engine.text_engine import TextEngine, TextOnly
from engine.tokenizer import encode_prompt

WORDS = "card page slot chunk token layer head cache draft step lane turn event pipe block warp".split()
HEADERS = {"Content-Type": "application/json"}


class Waiting(TextOnly, TextEngine):
    """An engine that computes nothing: an answer of n tokens takes n * pace seconds, in one of n_slots."""

    name, n_ctx, reason, fault, counts_pipes, cards, layers = "waiting", 4096, None, None, False, (), ()

    def __init__(self, pace: float = 0.02, n_slots: int = 4):
        opened = qengine.open_model(qengine.DEFAULT_MODEL)
        self.tokenizer, self.template, self.details = opened.tokenizer, opened.template, ModelDetails.of(opened.weights)
        self.pace, self.n_slots, self.slots = pace, n_slots, threading.Semaphore(n_slots)
        self.n_running = self.n_generated = 0
        self.words = self.tokenizer.encode(" ".join(WORDS))

    def encode(self, text):
        return encode_prompt(self.tokenizer, text, self.n_ctx)

    def submit(self, request: Request) -> Generation:
        generation = Generation(request, self.tokenizer)
        threading.Thread(target=self._write, args=(generation,), daemon=True).start()
        return generation

    def _write(self, generation):
        with self.slots:
            self.n_running += 1
            due = time.monotonic()
            for n in range(1, (generation.request.max_tokens or 64) + 1):
                due = max(due + self.pace, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
                self.n_generated += 1
                is_last = n == (generation.request.max_tokens or 64)
                if generation.cancelled or generation.push(self.words[n % len(self.words)], "length" * is_last or None):
                    break
            self.n_running -= 1
        generation.close()

    def close(self):
        pass

    def count_pipes(self):
        return None

    def stats(self):
        drafts = {name: (0,) * 7 for name in ("drafts_checked", "drafts_accepted")}
        return dict.fromkeys(["requests_waiting", "kv_pages_used", "checkpoints", "checkpoints_on_card",
                              "prompt_tokens", "cached_tokens", "checkpoints_spilled", "checkpoints_fetched",
                              "checkpoints_dropped"],
                             0) | {"requests_running": self.n_running, "kv_pages": 1,
                                   "generated_tokens": self.n_generated} | drafts


def loaded(**arguments):
    return qengine.load(card="emulated", progress=False, **arguments)


# ---- clusters and clients ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nodes(n: int):
    """A cluster of n nodes on this machine, joined."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from engine.replicas import cluster
    from ray.cluster_utils import Cluster
    one = Cluster()
    try:
        for _ in range(n):
            one.add_node(num_cpus=8, object_store_memory=100 << 20, include_dashboard=False)
        cluster.join(one.address)
        yield one
    finally:
        cluster.leave()
        one.shutdown()


@contextlib.contextmanager
def replicas(function: str, n: int, model: Facts, **arguments):
    """n replicas of what a function of this file makes, as an engine."""
    from engine.replicas import cluster, front
    recipe = cluster.Recipe(f"benchmarks.replicas:{function}", arguments)
    wish = cluster.Wish(f"bench-{function}-{n}-{random.randrange(10**6)}", recipe, n)
    cluster.keep(wish)
    link, facts = cluster.link(wish)
    engine = front.engine_of(link, model, facts)
    try:
        while sum(one.state == "up" for one in engine.replicas) < n:
            time.sleep(0.1)
        yield engine
    finally:
        engine.close()
        cluster.end(wish.application)


def waiting(**arguments):
    return Waiting(**arguments)


def ask(port: int, path: str, body: dict) -> tuple[str, float | None, dict]:
    """Streams an answer; (text, seconds to the first text, usage). Raises RuntimeError for an error in the stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began, first, text, usage = time.perf_counter(), None, [], {}
    connection.request("POST", path, json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}),
                       HEADERS)
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content")
                if piece and first is None:
                    first = time.perf_counter() - began
                text.append(piece or "")
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}")
    return "".join(text), first, usage


def together(n: int, work) -> float:
    """work(i) in n threads; the seconds that all take. Raises what one of them has raised."""
    began = time.perf_counter()
    with ThreadPoolExecutor(n) as pool:
        for one in [pool.submit(work, i) for i in range(n)]:
            one.result()
    return time.perf_counter() - began


def speed(port: int, n_clients: int, n_tokens: int, n_each: int = 1, seed: int = 0) -> float:
    """Tokens per second of clients that stream answers of so many tokens."""
    counted = []

    def client(i):
        for turn in range(n_each):
            body = {"prompt": f"Say it: {seed} {i} {turn}", "max_tokens": n_tokens, "temperature": 0,
                    "ignore_eos": True}
            counted.append(ask(port, "/v1/completions", body)[2]["completion_tokens"])

    seconds = together(n_clients, client)
    return sum(counted) / seconds


def app(engine):
    return create_app(engine, max_requests=256)


# ---- the measurements ----------------------------------------------------------------------------------------------


def overhead(options) -> dict:
    """In turn, so that whatever else this machine does disturbs both alike."""
    first, tokens = {"alone": [], "replica": []}, {"alone": [], "replica": []}
    from cli.replicas import load_replicas
    arguments = ["--serve", "0", "--card", "emulated", "--ctx", "2048", "--slots", "8"]
    models = {"alone": load_models(open_models(parsed(arguments)), free),
              "replica": load_replicas(parsed([*arguments, "--ray", "local"]))}
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(serving(create_app(models=each, max_requests=256), "127.0.0.1", 0))
                 for name, each in models.items()}
        for turn in range(options.rounds + 3):
            for name, port in ports.items():
                body = {"messages": [{"role": "user", "content": f"Tell me of card {turn}"}], "max_tokens": 8,
                        "temperature": 0}
                seconds = ask(port, "/v1/chat/completions", body)[1]
                if turn >= 3:
                    first[name].append(1e3 * seconds)
                time.sleep(0.02)
        for turn in range(-1, max(3, options.rounds // 8)):
            for name, port in ports.items():
                found = speed(port, 8, 200, seed=turn)
                if turn >= 0:
                    tokens[name].append(found)
    for each in models.values():
        each.close()
    return {"first token, ms": {name: round(statistics.median(each), 1) for name, each in first.items()},
            "later by, ms": round(statistics.median(first["replica"]) - statistics.median(first["alone"]), 1),
            "tokens/s, 8 clients": {name: round(statistics.median(each)) for name, each in tokens.items()},
            "share": round(statistics.median(a / b for a, b in zip(tokens["replica"], tokens["alone"])), 3)}


def parsed(arguments: list[str]):
    parser = build_parser()
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


ENGINES = {"waiting": (waiting, {"pace": 0.1, "n_slots": 4}, 50),
           "emulated": (loaded, {"ctx": 1024, "slots": 4}, 100)}   # the maker, its arguments, tokens of an answer


def two_nodes(options) -> dict:
    maker, arguments, n_tokens = ENGINES[options.engine]
    here = maker(**arguments)
    model, tokens, busy = Facts.of(here), {}, {}
    here.close()
    with nodes(2):
        for n in 1, 2:
            with (replicas(maker.__name__, n, model, **arguments) as engine,
                  serving(app(engine), "127.0.0.1", 0) as port):
                speed(port, 16, 5)
                before, began = processor_seconds(), time.perf_counter()
                tokens[n] = speed(port, 16, n_tokens)
                seconds = time.perf_counter() - began
                busy[n] = {who: round((used - before.get(who, 0)) / seconds, 2)
                           for who, used in processor_seconds().items()}
    return {"engine": options.engine, "tokens/s": {f"{n} replicas": round(each) for n, each in tokens.items()},
            "times": round(tokens[2] / tokens[1], 2), "processors": len(os.sched_getaffinity(0)),
            "of which are held by": {f"{n} replicas": each for n, each in busy.items()}}


def processor_seconds() -> dict[str, float]:
    """That this process and those which it has started have used so far, by what they are."""
    used, parents = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{pid}/cmdline") as file:
                parents[int(pid)] = int(fields[1])
                used[int(pid)] = role_of(file.read()), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    found = {"front and clients": used.pop(os.getpid())[1]}
    for who, seconds in (used[pid] for pid in mine if pid in used):
        found[who] = found.get(who, 0) + seconds
    return found


def role_of(command: str) -> str:
    """What a process of Ray's does, by its command line."""
    names = {"ServeReplica": "replicas", "ServeController": "Ray Serve's controller", "raylet/raylet": "raylets",
             "gcs_server": "Ray's head"}
    return next((who for name, who in names.items() if name in command), "the rest of Ray")


def affinity(options) -> dict:
    """The same conversations, drawn once, on three replicas and on one with three times the pages and checkpoints."""
    share, found = 4096, {}
    model = Facts.of(here := loaded(ctx=1024))
    here.close()
    with nodes(3):
        for name, n, times in ("three replicas", 3, 1), ("one, with their memory", 1, 3):
            arguments = {"ctx": 1024, "slots": 2, "kv_tokens": times * share, "checkpoint_memory": times * (24 << 20),
                         "checkpoint_host_memory": 0}
            with replicas("loaded", n, model, **arguments) as engine, serving(app(engine), "127.0.0.1", 0) as port:
                found[name] = converse(port, 3, options.conversations)
    share = found["three replicas"] / found["one, with their memory"]
    return {"cached tokens": found, "share": round(share, 3), "failed": share < 0.9}


def converse(port: int, n_clients: int, n: int) -> int:
    """n conversations of three turns, several at a time; the cached tokens of all prompts."""
    turns, cached, lock = iter(range(n)), [], threading.Lock()
    system = " ".join(random.Random(1).choices(WORDS, k=80))

    def client(_):
        while (i := next_of(turns, lock)) is not None:
            rng, messages = random.Random(i), [{"role": "system", "content": system}]
            for _ in range(3):
                messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=60))})
                text, _, usage = ask(port, "/v1/chat/completions", {"messages": messages, "temperature": 0,
                                                                     "max_tokens": 24})
                messages.append({"role": "assistant", "content": text})
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    together(n_clients, client)
    return sum(cached)


def next_of(numbers, lock):
    with lock:
        return next(numbers, None)


def soak(options) -> dict:
    """Answers are drawn from a deck of prompts, each of which was asked alone before."""
    deck = [{"prompt": f"{i}: " + " ".join(random.Random(i).choices(WORDS, k=20)), "max_tokens": 10 + 3 * (i % 20),
             "temperature": 0 if i % 2 else 0.8, "seed": i, "ignore_eos": True} for i in range(40)]
    here = loaded(ctx=1024, slots=4)
    model = Facts.of(here)
    with serving(app(here), "127.0.0.1", 0) as port:
        alone = [ask(port, "/v1/completions", body)[0] for body in deck]
    here.close()
    tally, wrong, over = {"answers": 0, "lost": 0, "killed": 0}, [], threading.Event()
    diary = Diary()
    with diary, nodes(2), replicas("loaded", options.replicas, model, ctx=1024, slots=4) as engine, \
            serving(app(engine), "127.0.0.1", 0) as port:

        def client(i):
            rng = random.Random(i)
            while not over.is_set():
                at = rng.randrange(len(deck))
                try:
                    text = ask(port, "/v1/completions", deck[at])[0]
                except (RuntimeError, OSError, http.client.HTTPException) as error:
                    tally["lost"] += 1
                    diary.write(f"client {i} lost an answer: {type(error).__name__}: {error}")
                    continue
                tally["answers"] += 1
                if text != alone[at]:
                    wrong.append(f"answer {at} differs: {text[:40]!r}")

        def killer(_):
            while not over.wait(options.kill_every):
                up = [one for one in engine.replicas if one.state == "up"]
                if up:
                    victim = random.choice(up)
                    diary.write(f"killed {victim.id} with {victim.n_open} answers; " + states_of(engine))
                    os.kill(victim.facts["pid"], signal.SIGKILL)
                    tally["killed"] += 1

        def watcher(_):
            before = None
            while not over.wait(0.2):
                if (now := states_of(engine)) != before:
                    diary.write(before := now)

        memory = []

        def clock(_):
            end = time.monotonic() + 60 * options.minutes
            while time.monotonic() < end:
                time.sleep(max(0.0, min(end - time.monotonic(), 60 * options.minutes / 10)))
                memory.append(resident_mb())
            over.set()

        workers = [client] * options.clients + [killer, watcher, clock]
        together(len(workers), lambda i: workers[i](i))
    grows = memory[-1] > memory[len(memory) // 2] * 1.05 + 24
    is_idle = not (tally["answers"] and tally["killed"])
    return tally | {"front, MB after each tenth": memory, "what was wrong": sorted(set(wrong))[:5],
                    "what happened": diary.lines, "failed": bool(wrong or tally["lost"]) or grows or is_idle}


class Diary(logging.Handler):
    """What happened when: what is written here, and what the front writes down of requests that lose replicas."""

    def __init__(self):
        super().__init__()
        self.began, self.lines, self.of = time.monotonic(), [], logging.getLogger("qengine.requests")

    def write(self, text: str):
        self.lines.append(f"{time.monotonic() - self.began:7.2f} s: {text}")

    def emit(self, record):
        if record.getMessage().startswith(("lost ", "gave up ")):
            self.write(record.getMessage())

    def __enter__(self):
        self.of.setLevel(logging.INFO)
        self.of.addHandler(self)

    def __exit__(self, *_):
        self.of.removeHandler(self)


def states_of(engine) -> str:
    return "replicas: " + ", ".join(f"{one.id} {one.state}" for one in engine.replicas)


def resident_mb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def front(options) -> dict:
    """The clients are a process of their own; the front has one processor, and replicas write as fast as is asked."""
    from concurrent.futures import ProcessPoolExecutor
    import multiprocessing
    model, found = Facts.of(Waiting()), {}
    processors = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with nodes(2), ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(os.getpid).result()
        for asked in options.rates:
            pace = options.clients / asked
            with replicas("waiting", 2, model, pace=pace, n_slots=options.clients) as engine, \
                    serving(app(engine), "127.0.0.1", 0) as port:
                os.sched_setaffinity(0, processors[:1])
                for task in os.listdir("/proc/self/task"):
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task), processors[:1])
                used = time.process_time()
                n_tokens = int(options.seconds / pace)
                got = pool.submit(speed, port, options.clients, n_tokens).result()
                found[asked] = {"tokens/s": round(got), "of a processor":
                                round((time.process_time() - used) / options.seconds, 2)}
                for task in os.listdir("/proc/self/task"):
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task), processors)
    return found


MEASUREMENTS = {"overhead": overhead, "nodes": two_nodes, "affinity": affinity, "soak": soak, "front": front}


def main() -> int:
    parser = argparse.ArgumentParser(description="What replicas on Ray cost and win.")
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--rounds", type=int, default=40, help="of overhead (default: 40)")
    parser.add_argument("--engine", choices=ENGINES, default="waiting", help="of nodes (default: waiting)")
    parser.add_argument("--conversations", type=int, default=18, help="of affinity (default: 18)")
    parser.add_argument("--clients", type=int, default=32, help="of soak and front (default: 32)")
    parser.add_argument("--replicas", type=int, default=3, help="of soak (default: 3)")
    parser.add_argument("--minutes", type=float, default=5, help="of soak (default: 5)")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds, of soak (default: 60)")
    parser.add_argument("--rates", type=lambda text: [int(n) for n in text.split(",")], default=[1000, 2000, 4000],
                        help="tokens/s that the engines of front write together (default: 1000,2000,4000)")
    parser.add_argument("--seconds", type=float, default=10, help="of each rate of front (default: 10)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    found = MEASUREMENTS[options.what](options)
    print(json.dumps(found, indent=1))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"what": options.what, "found": found}, file, indent=1)
    return int(bool(found.get("failed")))


if __name__ == "__main__":
    run_program(main)
