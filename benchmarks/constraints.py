"""What a grammar costs: `python -m benchmarks.constraints [MODEL] [--card CARD] [--batch N] [--tokens N]`.

The same requests with and without a JSON schema, alone and N at a time, as tokens per second after the first token of
each, the best of five. The schema is an array of records without an end, so that both run to the same length.
"""

import argparse
import json

import llguidance

import qengine

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
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides=SPACING)
    for batch in dict.fromkeys((1, choice.batch)):
        rounds = [[speed(engine, batch, choice.tokens, g) for g in (None, grammar)] for _ in range(5)]
        free, bound = map(max, zip(*rounds))
        print(f"{engine.name}, batch of {batch}: {free:.0f} tokens/s, with a JSON schema {bound:.0f}: "
              f"{100 * bound / free:.0f} %")
    engine.close()


def speed(engine, batch, n_tokens, grammar):
    """Tokens per second of a batch after everyone's first token."""
    prompt = engine.encode("People as JSON, one after the other:\n")
    requests = [qengine.Request(prompt, max_tokens=n_tokens, ignore_eos=True, temperature=1.0, seed=seed,
                                grammar=grammar) for seed in range(batch)]
    generations = [engine.submit(request) for request in requests]
    for generation in generations:
        generation.wait()
    started, ended = (max(g.token_times[i] for g in generations) for i in (0, -1))
    later = sum(time > started for g in generations for time in g.token_times)
    return later / (ended - started)


if __name__ == "__main__":
    main()
