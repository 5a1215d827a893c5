"""How fast a model runs: `python -m benchmarks.engine [MODEL] [--card CARD] [--prompt N] [--tokens N]`.

MODEL is a GGUF file or synthetic:NAME, and the model that comes with qengine where none is named. The prompt is random
tokens; times are those at which the scheduler made the tokens, the best of three requests. Prefill is prompt tokens per
second until the first token is there; decode is the tokens after it.
"""

import argparse

import numpy as np

import qengine
from cli.ending import run_program


def main():
    parser = argparse.ArgumentParser(description="Prefill and decode speed of one request.")
    parser.add_argument("model", nargs="?", default=qengine.DEFAULT_MODEL,
                        help="a GGUF file, or synthetic:tiny, synthetic:0.8b, ... (default: qengine's own)")
    parser.add_argument("--card", help="cuda:0, emulated, ... (default: a real card, else the emulated one)")
    parser.add_argument("--prompt", type=int, default=297, help="tokens of the prompt (default: 297)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default: 128)")
    choice = parser.parse_args()
    engine = qengine.load(choice.model, card=choice.card, ctx=choice.prompt + choice.tokens)
    ids = np.random.default_rng(1).integers(0, 256, choice.prompt).tolist()
    prefill, decode = zip(*(speeds(engine, ids, choice.tokens) for _ in range(3)))
    print(f"{engine.name}: prompt of {choice.prompt} tokens {max(prefill):.0f} tokens/s, "
          f"first token after {1000 * choice.prompt / max(prefill):.1f} ms; "
          f"decode at {choice.prompt} to {choice.prompt + choice.tokens} tokens {max(decode):.0f} tokens/s")
    engine.close()


def speeds(engine, ids, n_tokens, **fields):
    """(prefill, decode) in tokens per second, of a prompt that the engine does not remember. fields: of the Request."""
    engine.clear_cache()
    generation = engine.submit(qengine.Request(ids, max_tokens=n_tokens, ignore_eos=True, **fields))
    generation.wait()
    times = generation.token_times
    return len(ids) / (times[0] - generation.started), (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    run_program(main)
