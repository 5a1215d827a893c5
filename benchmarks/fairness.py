"""What long prompts cost others: `python -m benchmarks.fairness [MODEL] [--card CARD] [--prompt N] [--long N]`.

Long prompts of random tokens arrive together, once with nobody else and once beside a running answer. A short prompt
arrives a moment after them. Printed are the seconds until its first token, the tokens per second of the running answer
until the long prompts are done, and the seconds that these take.
"""

import argparse
import threading
import time

import numpy as np

import qengine

SHORT = 20                  # tokens of the short prompt
ARRIVES = 0.1               # seconds after the long ones


def main():
    parser = argparse.ArgumentParser(description="A short prompt and a running answer beside long prompts.")
    parser.add_argument("model", nargs="?", default=qengine.DEFAULT_MODEL,
                        help="a GGUF file, or synthetic:tiny, synthetic:0.8b, ... (default: qengine's own)")
    parser.add_argument("--card", help="cuda:0, emulated, ... (default: a real card, else the emulated one)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a long prompt (default: 4000)")
    parser.add_argument("--long", type=int, default=3, help="long prompts at the same time (default: 3)")
    choice = parser.parse_args()
    engine = qengine.load(choice.model, card=choice.card, ctx=2 * choice.prompt, slots=choice.long + 2)
    first(engine)                                   # what a card does for the first time takes longer
    print("| long prompts | running answer | short prompt: first token | running answer | long prompts: all done |")
    print("|---|---|---|---|---|")
    for n_long, is_running in (0, False), (0, True), (choice.long, False), (choice.long, True):
        print(row(engine, n_long, choice.prompt, is_running), flush=True)
    engine.close()


def row(engine, n_long, n_prompt, is_running) -> str:
    """A line of the table."""
    engine.clear_cache()
    answer = engine.submit(prompt(0, SHORT, None)) if is_running else None
    while is_running and answer.n_generated < 100:
        time.sleep(0.01)
    begin = time.perf_counter()
    prompts = [engine.submit(prompt(seed, n_prompt, 1)) for seed in range(1, n_long + 1)]
    threading.Event().wait(ARRIVES)
    seconds = first(engine)
    for generation in prompts:
        generation.wait()
    if not prompts:
        time.sleep(1)
    end = time.perf_counter()
    speed = "-"
    if is_running:
        speed = f"{sum(begin <= at <= end for at in answer.token_times) / (end - begin):.0f} tokens/s"
        answer.cancel()
        answer.wait()
    done = f"{max(generation.token_times[0] for generation in prompts) - begin:.1f} s" if prompts else "-"
    return f"| {n_long or '-'} | {'yes' if is_running else '-'} | {seconds:.2f} s | {speed} | {done} |"


def first(engine) -> float:
    """Seconds until a short prompt has its first token."""
    generation = engine.submit(prompt(99, SHORT, 1))
    generation.wait()
    return generation.token_times[0] - generation.started


def prompt(seed, n, max_tokens):
    ids = np.random.default_rng(seed).integers(0, 256, n).tolist()
    return qengine.Request(ids, max_tokens=max_tokens, ignore_eos=True)


if __name__ == "__main__":
    main()
