"""What a grammar costs: `python -m benchmarks.constraints [MODEL] [--card CARD] [--batch N] [--tokens N]`.

The same requests with and without a JSON schema, alone and N at a time, to the engine and streamed by the server, as
tokens per second after the first token of each, the best of five. The schema is an array of records without an end, so
that both run to the same length. Last, how many tokens were forced, and in what runs: of the schema, and of calls of
tools.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import time
import urllib.request
from types import SimpleNamespace

import llguidance

import qengine
from api import chat, openai
from api.http import serving
from api.service import create_app
from cli.ending import run_program
from engine.constraints import Constraint

RECORD = {"type": "object", "additionalProperties": False, "required": ["name", "age", "size", "tags", "home"],
          "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0},
                         "size": {"enum": ["small", "medium", "large"]},
                         "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
                         "home": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}]}}}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def main():
    parser = argparse.ArgumentParser(description="Decode speed with and without a JSON schema.")
    parser.add_argument("model", nargs="?", default=qengine.DEFAULT_MODEL,
                        help="a GGUF file, or synthetic:tiny, synthetic:0.8b, ... (default: qengine's own)")
    parser.add_argument("--card", help="cuda:0, emulated, ... (default: a real card, else the emulated one)")
    parser.add_argument("--batch", type=int, default=8, help="requests at the same time (default: 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer (default: 128)")
    choice = parser.parse_args()
    engine = qengine.load(choice.model, card=choice.card, ctx=512, slots=choice.batch)
    app = create_app(engine)
    with serving(app, "127.0.0.1", 0) as port:
        for how, measure in ("", of_engine), (", streamed", of_server):
            for batch in dict.fromkeys((1, choice.batch)):
                rounds = [[measure(engine, port, batch, choice.tokens, ruled) for ruled in (False, True)]
                          for _ in range(5)]
                free, bound = map(max, zip(*rounds))
                print(f"{engine.name}, batch of {batch}{how}: {free:.0f} tokens/s, with a JSON schema {bound:.0f}: "
                      f"{100 * bound / free:.0f} %")
    for name, asked in {"the schema": requests(engine, 1, choice.tokens, True), "calls": calls(engine)}.items():
        print(f"{name}: of {forced(engine, asked)}")
    engine.close()


MESSAGES = [{"role": "user", "content": "People as JSON, one after the other."}]
PLAIN = {"enable_thinking": False}


def requests(engine, batch, n_tokens, ruled):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides=SPACING) if ruled else None
    prompt = engine.encode(engine.template.render(MESSAGES, **PLAIN))
    return [qengine.Request(prompt, max_tokens=n_tokens, ignore_eos=True, temperature=1.0, seed=seed, grammar=grammar)
            for seed in range(batch)]


def of_engine(engine, port, batch, n_tokens, ruled):
    generations = [engine.submit(request) for request in requests(engine, batch, n_tokens, ruled)]
    for generation in generations:
        generation.wait()
    return speed([generation.token_times for generation in generations])


def of_server(engine, port, batch, n_tokens, ruled):
    """Every token is a chunk here, for each has its log-probability."""
    rules = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}}
    body = {"messages": MESSAGES, "chat_template_kwargs": PLAIN, "max_tokens": n_tokens, "ignore_eos": True,
            "temperature": 1.0, "logprobs": True, "stream": True} | (rules if ruled else {})
    with concurrent.futures.ThreadPoolExecutor(batch) as clients:
        return speed(list(clients.map(lambda seed: arrivals(port, body | {"seed": seed}), range(batch))))


def arrivals(port, body):
    """When each token of a streamed answer came."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as stream:
        return [time.perf_counter() for line in stream if b'"logprob"' in line]


def speed(times):
    """Tokens per second of a batch after everyone's first token."""
    started, ended = (max(each[i] for each in times) for i in (0, -1))
    return sum(time > started for each in times for time in each) / (ended - started)


TOOLS = [{"type": "function", "function": {"name": f"{verb}_file", "description": "A file.", "parameters": {
    "type": "object", "required": ["path", "line_number", "at_once"], "properties": {
        "path": {"type": "string", "maxLength": 20}, "line_number": {"type": "integer", "maximum": 999},
        "at_once": {"type": "boolean"}}}}} for verb in ("read", "write")]


def calls(engine):
    """Drawn answers that have to be calls."""
    service = SimpleNamespace(engine=engine, ready=lambda: engine, thinking=False)
    conversation = openai.read_conversation({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"})
    turn = chat.prepare(service, conversation)
    return [qengine.Request(turn.prompt_ids, max_tokens=200, temperature=1.0, seed=seed, **turn.rules)
            for seed in range(8)]


def forced(engine, asked):
    """What the grammars of these requests left no choice of in the answers."""
    n_tokens, runs = 0, collections.Counter()
    for request in asked:
        constraint, was_forced = Constraint(engine.vocabulary, request.grammar, request.grammar_after), []
        for delta in engine.submit(request):
            was_forced.append(bool(constraint.forced))
            constraint.take(delta.token_id)
        n_tokens += len(was_forced)
        runs.update(len(list(run)) for is_forced, run in itertools.groupby(was_forced) if is_forced)
    listed = ", ".join(f"{n} ({runs[n]} times)" for n in sorted(runs))
    return f"{n_tokens} tokens {sum(n * runs[n] for n in runs)} were forced, in runs of {listed}"


if __name__ == "__main__":
    run_program(main)
