"""A server under many clients: `python -m benchmarks.soak [MODEL] [--card CARD] [--clients 32] [--minutes 5]`.

A deck of conversations is asked first, each alone, without streaming and with empty caches. Then clients, in a process
of their own, ask them over HTTP, drawn at random, streamed or whole, all at the same time; at a third of the turns they
hang up at a random point. The caches are too small for all: checkpoints are spilled and dropped. What has to hold:

- no error, and no answer later than --patience;
- every answer is the one given alone: text, thoughts, calls, finish reason, log-probabilities to the last digit. The
  exception is a later turn of a conversation that was spared more tokens than its first prompt has: its states may come
  from tokens that were decoded, which round differently. Such an answer may differ from the one given alone, if the
  first other token was a close second: its log-probability is within MARGIN of the one chosen there (these turns are
  greedy);
- the server's memory after half of the time, a minute at most, and at the end differ by GROWTH at most. By then it has
  taken all that its settings allow: a page or a checkpoint gets its memory at its first use, and all are used once
  before the clients come;
- with --hostile N, so many more clients send what benchmarks/hostile.py describes, and each gets its refusal;
- at the end nothing runs, every slot is free, and every page is free or kept for later; after `clear_cache` free.

A table at the end; the exit code is 1 if anything did not hold.
"""

import argparse
import collections
import concurrent.futures
import http.client
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import threading
import time
from dataclasses import dataclass

import qengine
from api.http import serving
from api.service import create_app
from cli.ending import run_program
from benchmarks import hostile
from engine.prefix import PAGE_TOKENS, pages_for

PATH = "/v1/chat/completions"
CONTEXT = 2048
CHECKPOINT_MEMORY = 32 << 20    # bytes, on the card and in the host's memory each
LEAVING = 1 / 3             # of all turns the client hangs up on, unless the answer is there before
END = "<|im_end|>"          # the token that ends an answer, and is not listed with those of its text
MARGIN = 0.25               # nats; decoded states move logits by about 2 % of their spread (tests/test_cache.py)
GROWTH = 0.05               # of the memory, or LEAST_GROWTH where that is more
# Bytes. The C library keeps what a thread has freed for that thread, and the server has four for each client: until
# all have enough, 1 KB of each request stays; with glibc.malloc.tcache_count=0 in GLIBC_TUNABLES nothing did.
LEAST_GROWTH = 24 << 20

# ---- what is asked -----------------------------------------------------------------------------------------

PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "pets"], "properties": {
    "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
           "required": ["city", "days"]}
MAIL = {"type": "object", "properties": {"to": {"enum": ["Ann", "Bob"]}, "urgent": {"type": "boolean"}},
        "required": ["to", "urgent"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
         for name, text, parameters in (("get_weather", "Get the weather.", WEATHER),
                                        ("send_mail", "Send a mail.", MAIL))]
WORDS = ("What is qengine?", "Tell me of cards without tensor cores.", "Why is a checkpoint taken?", "Who reads this?",
         "How many pages has a context?", "Which is faster, dp4a or fp32?", "Name three colours.", "Write a poem.")


@dataclass
class Turn:
    """A request and the answer that it got alone. n_first: tokens of the first prompt of its conversation."""

    kind: str
    body: dict
    answer: "Answer | None" = None
    n_first: int = 0


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def deck(n: int) -> list[list[Turn]]:
    """n conversations, the same every time; most of one turn. The turns of one hold no answers yet."""
    rng, makers = random.Random(7), (short, long, drawn, schema, tools, several, conversation, thoughts)
    return [makers[i % len(makers)](rng) for i in range(n)]


def question(rng) -> str:
    return f"{rng.choice(WORDS)} ({rng.randrange(1000)})"


def single(kind: str, text: str, **fields) -> list[Turn]:
    return [Turn(kind, {"messages": [user(text)], "temperature": 0} | fields)]


def short(rng):
    return single("short", question(rng), max_tokens=rng.randint(1, 40), logprobs=True, top_logprobs=2)


def long(rng):
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(40, 100)))
    return single("long prompt", text, max_tokens=rng.randint(8, 64))


def drawn(rng):
    return single("seeded", question(rng), temperature=rng.choice([0.7, 1.0, 1.5]), seed=rng.randrange(2**63), top_k=40,
                  top_p=0.95, presence_penalty=0.5, max_tokens=rng.randint(30, 120), stop=["\n\n"])


def schema(rng):
    return single("schema", question(rng), temperature=rng.choice([0, 1.2]), seed=rng.randrange(1000), max_tokens=80,
                  response_format=FORMAT)


def tools(rng):
    city, choice = rng.choice(["Paris", "Seoul", "Oslo"]), rng.choice(["auto", "required"])
    return single("tools", f"Please get the weather with city {city} and days {rng.randint(1, 9)}.", tools=TOOLS,
                  tool_choice=choice, max_tokens=120)


def several(rng):
    return single("n = 2", question(rng), n=2, temperature=1, seed=rng.randrange(1000), max_tokens=rng.randint(10, 50))


def thoughts(rng):
    text = f"What is {rng.randint(1, 50)} + {rng.randint(1, 50)}?"
    return single("thoughts", text, max_tokens=90, chat_template_kwargs={"enable_thinking": True})


def conversation(rng):
    """Turns that get their history, the answers included, from `ask_alone`."""
    system = f"You are patient helper number {rng.randrange(1000)}. " * rng.randint(2, 12)
    turns = [Turn("conversation", {"messages": [user(question(rng))], "temperature": 0, "logprobs": True,
                                   "top_logprobs": 5, "max_tokens": rng.randint(8, 70)}) for _ in range(3)]
    turns[0].body["messages"].insert(0, {"role": "system", "content": system})
    return turns


# ---- a client ----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """choices: of each its content, thoughts, calls [[name, arguments], ...], finish reason, log-probabilities."""

    choices: list
    n_prompt: int
    n_cached: int
    n_generated: int
    first: float            # seconds until something was said
    seconds: float          # until the end


class Failed(Exception):
    """The server said something else than an answer."""


class Left(Exception):
    """The client has hung up, as it was to."""


@dataclass(frozen=True)
class Leave:
    """When a client hangs up: after so many seconds without having read anything, or after so many chunks."""

    seconds: float | None = None
    chunks: int | None = None


def random_leave(rng, turn: Turn, stream: bool) -> Leave:
    """The request may wait still, or its prompt run, or its answer, or that may be there."""
    if stream and rng.random() < 0.7:
        return Leave(chunks=rng.randint(0, turn.answer.n_generated))
    return Leave(seconds=rng.random() ** 2)


def ask(port: int, body: dict, patience: float, leave: Leave = Leave()) -> Answer:
    """The answer to a chat request. Left, if it was told to leave; Failed, OSError."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)
    try:
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        if leave.seconds is not None:
            time.sleep(leave.seconds)
            raise Left
        with connection.getresponse() as response:
            if response.status != 200:
                raise Failed(f"{response.status}: {response.read(500)!r}")
            if not body.get("stream"):
                whole = json.load(response)
                seconds = time.perf_counter() - started
                choices = [choice_of(one["message"], one) for one in whole["choices"]]
                return answer_of(choices, whole["usage"], seconds, seconds)
            return read_stream(response, body.get("n", 1), started, leave.chunks)
    finally:
        connection.close()


def read_stream(response, n: int, started: float, leaves_at: int | None) -> Answer:
    """leaves_at: the chunk after which to hang up."""
    messages = [{"content": "", "reasoning_content": "", "tool_calls": []} for _ in range(n)]
    ends = [{"finish_reason": None, "logprobs": None} for _ in range(n)]
    usage, first, is_done = None, None, False
    for number, line in enumerate(line for line in response if line.startswith(b"data: ")):
        if number == leaves_at:
            raise Left
        if line.strip() == b"data: [DONE]":
            is_done = True
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise Failed(str(chunk["error"]))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            add_delta(messages[choice["index"]], ends[choice["index"]], choice)
            if first is None and (choice["finish_reason"] or choice["delta"].keys() - {"role", "content"}
                                  or choice["delta"].get("content")):
                first = time.perf_counter() - started
    if not is_done:
        raise Failed("the stream broke off")
    choices = [choice_of(message, end) for message, end in zip(messages, ends)]
    return answer_of(choices, usage, first, time.perf_counter() - started)


def add_delta(message: dict, end: dict, choice: dict):
    delta = choice["delta"]
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name) or ""
    for call in delta.get("tool_calls", []):
        if "id" in call:
            message["tool_calls"].append({"function": dict(call["function"])})
        else:
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    end["finish_reason"] = choice["finish_reason"] or end["finish_reason"]
    if choice["logprobs"]:
        end["logprobs"] = end["logprobs"] or {"content": []}
        end["logprobs"]["content"] += choice["logprobs"]["content"]


def choice_of(message: dict, end: dict) -> dict:
    """What has to be the same, streamed or whole."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    return {"content": message["content"] or "", "thoughts": message.get("reasoning_content", ""), "calls": calls,
            "finish_reason": end["finish_reason"], "logprobs": (end["logprobs"] or {}).get("content", [])}


def answer_of(choices, usage, first, seconds) -> Answer:
    return Answer(choices, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
                  usage["completion_tokens"], first, seconds)


def verdict(turn: Turn, answer: Answer) -> str:
    """"same", "close", or how an answer differs from the one given alone."""
    if answer.choices == turn.answer.choices:
        return "same"
    if turn.n_first and answer.n_cached > turn.n_first:
        if is_close(*(one.choices[0]["logprobs"] for one in (answer, turn.answer))):
            return "close"
    return f"differs: {told(answer)}, alone {told(turn.answer)} ({answer.n_cached} of {answer.n_prompt} tokens cached)"


def is_close(got: list[dict], want: list[dict]) -> bool:
    """Whether two lists of log-probabilities part, if they do, where both ways were nearly as likely."""
    for ours, theirs in itertools.zip_longest(got, want):
        if ours and theirs and ours["token"] == theirs["token"]:
            if abs(ours["logprob"] - theirs["logprob"]) > MARGIN:
                return False
            continue
        entry, other = (theirs, ours["token"] if ours else END) if theirs else (ours, END)
        likeliest = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        return entry["logprob"] - likeliest.get(other, -math.inf) < MARGIN
    return True


def told(answer: Answer) -> str:
    return json.dumps([{name: value for name, value in one.items() if name != "logprobs"} for one in answer.choices])


# ---- clients, in a process of their own --------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of a turn: "same", "close", "left", or what was wrong."""

    client: int
    kind: str
    result: str
    first: float | None = None
    seconds: float | None = None


def drive(port: int, cards: list[list[Turn]], n_clients: int, seconds: float, patience: float) -> list[Outcome]:
    """Clients that ask, each one thing after the other, until the time is over."""
    outcomes, end = [], time.monotonic() + seconds
    clients = [threading.Thread(target=run_client, args=(port, cards, i, end, patience, outcomes))
               for i in range(n_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return outcomes


def run_client(port, cards, number, end, patience, outcomes):
    rng = random.Random(number)
    while time.monotonic() < end:
        for turn in rng.choice(cards):
            stream = {"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.6 else {}
            leave = random_leave(rng, turn, bool(stream)) if rng.random() < LEAVING else Leave()
            try:
                answer = ask(port, turn.body | stream, patience, leave)
                outcome = Outcome(number, turn.kind, verdict(turn, answer), answer.first if stream else None,
                                  answer.seconds)
            except Left:
                outcome = Outcome(number, turn.kind, "left")
            except (Failed, OSError, ValueError, http.client.HTTPException) as error:
                outcome = Outcome(number, turn.kind, f"error: {type(error).__name__}: {error}")
            outcomes.append(outcome)
            if outcome.result not in ("same", "close"):
                break                               # of the conversation, at the first turn without an answer


# ---- the server --------------------------------------------------------------------------------------------


def ask_alone(engine, port: int, cards: list[list[Turn]], patience: float):
    """Puts into every turn its history and its answer, given with empty caches."""
    for turns in cards:
        history = []
        for turn in turns:
            turn.body["messages"] = history + turn.body["messages"]
            engine.clear_cache()
            turn.answer = ask(port, turn.body, patience)
            turn.n_first = turns[0].answer.n_prompt if turn is not turns[0] else 0
            history = [*turn.body["messages"],
                       {"role": "assistant", "content": turn.answer.choices[0]["content"]}]
    engine.clear_cache()


def fill_caches(engine):
    """Uses every page and every checkpoint once: as many short prompts as it takes until one is dropped for want of
    room, which have few pages, then long ones, which have them all."""
    rng, dropped = random.Random(8), engine.stats()["checkpoints_dropped"]

    def ask_for(n_tokens):
        ids = [rng.randrange(engine.tokenizer.n_vocab) for _ in range(n_tokens)]
        engine.submit(qengine.Request(ids, max_tokens=1)).wait()

    while engine.stats()["checkpoints_dropped"] == dropped:
        ask_for(2 * PAGE_TOKENS + 1)
    for _ in range(engine.stats()["kv_pages"] // pages_for(engine.n_ctx) + 2):
        ask_for(engine.n_ctx - 1)
    engine.clear_cache()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_recordings(engine) -> int:
    """Decode steps that the cards have recorded, one for each shape that came, with and without drafts."""
    return sum(len(stage.recordings) for stage in engine.pipeline.stages)


def what_is_left(engine, service) -> list[str]:
    """What has not come back, once all clients are gone."""
    end = time.monotonic() + 10
    while (engine.stats()["requests_running"] or service.open) and time.monotonic() < end:
        time.sleep(0.05)
    stats, faults = engine.stats(), []
    for name in ("requests_running", "requests_waiting", "kv_pages_used"):
        if stats[name]:
            faults.append(f"{name} is {stats[name]} at the end")
    if len(engine.scheduler.free_slots) != stats["slots"]:
        faults.append(f"{len(engine.scheduler.free_slots)} of {stats['slots']} slots are free at the end")
    if service.open or service.log.running:
        faults.append(f"the server holds {len(service.open)} generations and {len(service.log.running)} requests")
    engine.clear_cache()
    stats = engine.stats()
    if (stats["kv_pages_free"], stats["checkpoints"]) != (stats["kv_pages"], 0):
        faults.append(f"of {stats['kv_pages']} pages {stats['kv_pages_free']} are free without a cache, "
                      f"and {stats['checkpoints']} checkpoints are left")
    return faults


def load(model=qengine.DEFAULT_MODEL, card=None, slots=8, kv=None):
    """An engine whose caches are too small for what it will be asked."""
    return qengine.load(model, card=card, ctx=CONTEXT, slots=slots, kv=kv, kv_tokens=CONTEXT * slots,
                        checkpoint_memory=CHECKPOINT_MEMORY, checkpoint_host_memory=CHECKPOINT_MEMORY)


def soak(engine, n_clients: int, seconds: float, n_cards: int, patience: float,
         n_hostile: int = 0) -> tuple[list[Outcome], list[str]]:
    """What came of every turn, and all that was wrong; prints the table."""
    app = create_app(engine, max_requests=4 * (n_clients + n_hostile))      # who left is open until that is noticed
    cards, service = deck(n_cards), app.extensions["qengine"]
    context = multiprocessing.get_context("spawn")                      # the engine has threads
    with (serving(app, "127.0.0.1", 0) as port,
          concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as process):
        ask_alone(engine, int(port), cards, patience)
        fill_caches(engine)
        before, started = engine.stats(), time.perf_counter()
        driven = process.submit(drive, int(port), cards, n_clients, seconds, patience)
        attacked = process.submit(hostile.drive, int(port), n_hostile, seconds, patience)
        concurrent.futures.wait([driven], min(60, seconds / 2))
        early, early_steps = resident_bytes(), count_recordings(engine)
        outcomes, late = driven.result(), resident_bytes()
        took = time.perf_counter() - started
        attacks, wrong = attacked.result()
        after = engine.stats()
        faults = wrong + what_is_left(engine, service)
    faults = [f"{o.kind}: {o.result}" for o in outcomes if o.result not in ("same", "close", "left")] + faults
    if silent := n_clients - len({o.client for o in outcomes if o.seconds is not None}):
        faults.append(f"{silent} clients got no answer at all")
    if late - early > max(GROWTH * early, LEAST_GROWTH):
        faults.append("the server's memory has grown")
    print_table(outcomes)
    if n_hostile:
        print("hostile requests:", ", ".join(f"{count} {name}" for name, count in sorted(attacks.items())))
    counts = {name: n - before[name] for name, n in after.items() if isinstance(n, int)}    # not those by position
    print(f"{took:.0f} s: {counts['requests']} requests of {n_clients} clients on {after['slots']} slots, "
          f"{counts['prompt_tokens']:,} prompt tokens ({counts['cached_tokens']:,} cached), "
          f"{counts['generated_tokens']:,} generated; checkpoints: {counts['checkpoints_spilled']:,} spilled, "
          f"{counts['checkpoints_fetched']:,} fetched, {counts['checkpoints_dropped']:,} dropped; drafts: "
          f"{sum(after['drafts_checked']) - sum(before['drafts_checked']):,} checked, "
          f"{sum(after['drafts_accepted']) - sum(before['drafts_accepted']):,} right")
    print(f"memory of the server: {early / 2**20:.1f} MiB with {early_steps} recordings of steps after "
          f"{min(60, seconds / 2):.0f} s, {late / 2**20:.1f} MiB with {count_recordings(engine)} at the end")
    return outcomes, faults


def print_table(outcomes: list[Outcome]):
    finished = [o for o in outcomes if o.seconds is not None]
    print("| | answers | the same | close | left | median s | longest s | longest wait for the first token, s |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in [*dict.fromkeys(sorted(o.kind for o in outcomes)), "all"]:
        results = collections.Counter(o.result for o in outcomes if kind in (o.kind, "all"))
        ours = [o for o in finished if kind in (o.kind, "all")]
        seconds, firsts = [o.seconds for o in ours] or [0], [o.first for o in ours if o.first is not None] or [0]
        print(f"| {kind} | {len(ours)} | {results['same']} | {results['close']} | {results['left']} "
              f"| {statistics.median(seconds):.2f} | {max(seconds):.2f} | {max(firsts):.2f} |")
    answers = collections.Counter(o.client for o in finished)
    if answers:
        print(f"answers of a client: {min(answers.values())} to {max(answers.values())}, of {len(answers)} clients")


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description="A server under many clients: each gets what it gets alone.")
    parser.add_argument("model", nargs="?", default=qengine.DEFAULT_MODEL, help="a GGUF file (default: qengine's own)")
    parser.add_argument("--card", help="cuda:0, emulated, ... (default: a real card, else the emulated one)")
    parser.add_argument("--clients", type=int, default=32, help="at the same time (default: 32)")
    parser.add_argument("--hostile", type=int, default=0, metavar="N",
                        help="clients beside them that want to keep the server busy (default: 0)")
    parser.add_argument("--minutes", type=float, default=5, help="how long they ask (default: 5)")
    parser.add_argument("--slots", type=int, default=8, help="of the server (default: 8)")
    parser.add_argument("--cards", type=int, default=64, help="different conversations (default: 64)")
    parser.add_argument("--patience", type=float, default=60, help="seconds that an answer may take (default: 60)")
    parser.add_argument("--kv", metavar="FORMAT", help="as for qengine.py")
    choice = parser.parse_args(arguments)
    engine = load(choice.model, choice.card, choice.slots, choice.kv)
    _, faults = soak(engine, choice.clients, 60 * choice.minutes, choice.cards, choice.patience,
                     choice.hostile)
    engine.close()
    for fault in faults[:20]:
        print(f"WRONG: {fault[:1000]}")
    print(f"{len(faults)} faults" if faults else "all is well")
    return bool(faults)


if __name__ == "__main__":
    run_program(main)
