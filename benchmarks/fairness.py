"""What long prompts cost others: `python -m benchmarks.fairness [MODEL] [--card CARD] [--prompt N] [--long N]`.

Long prompts of random tokens arrive together, once with nobody else and once beside a running answer. A short prompt
arrives a moment after them. Printed are the seconds until its first token, the tokens per second of the running answer
until the long prompts are done, and the seconds that these take.

With `--answers N`, one long prompt arrives beside N running answers: `--answers 8 --prompt 18400` is the case of
benchmarks/results.md. Printed are the longest and the median gap between two tokens of an answer, as the host sees
them, while the prompt is computed; and the prompt's speed, also in per cent of its speed alone. The first line is the
first long prompt of the process, for which no part of a pass has been timed yet (engine/turns.py).
"""

import argparse
import itertools
import threading
import time

import numpy as np

import qengine
from cli.ending import run_program
from cli.serve import freeze

SHORT = 20                  # tokens of the short prompt, and of those of answers
ARRIVES = 0.1               # seconds after the long ones
REPEATS = 3                 # of a long prompt alone, and as many times beside answers
BEGUN = 50                  # tokens that every answer has before the long prompt arrives


def main():
    parser = argparse.ArgumentParser(description="A short prompt and running answers beside long prompts.")
    parser.add_argument("model", nargs="?", default=qengine.DEFAULT_MODEL,
                        help="a GGUF file, or synthetic:tiny, synthetic:0.8b, ... (default: qengine's own)")
    parser.add_argument("--card", help="cuda:0, emulated, ... (default: a real card, else the emulated one)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a long prompt (default: 4000)")
    parser.add_argument("--long", type=int, default=3, help="long prompts at the same time (default: 3)")
    parser.add_argument("--answers", type=int, help="one long prompt beside so many answers, and their gaps")
    choice = parser.parse_args()
    slots = choice.answers + 1 if choice.answers else choice.long + 2
    engine = qengine.load(choice.model, card=choice.card, ctx=2 * choice.prompt, slots=slots)
    first(engine)                                   # what a card does for the first time takes longer
    freeze()                                        # as a server does
    for line in gap_lines(engine, choice) if choice.answers else lines(engine, choice):
        print(line, flush=True)
    engine.close()


def lines(engine, choice):
    """The lines of the table of long prompts, a short one and an answer."""
    yield "| long prompts | running answer | short prompt: first token | running answer | long prompts: all done |"
    yield "|---|---|---|---|---|"
    for n_long, is_running in (0, False), (0, True), (choice.long, False), (choice.long, True):
        yield row(engine, n_long, choice.prompt, is_running)


def gap_lines(engine, choice):
    """The lines of the table of one long prompt and several answers."""
    seeds, own = itertools.count(1), None
    yield f"| prompt of {choice.prompt} tokens | longest gap, ms | median gap, ms | prompt, tokens/s | of alone | " \
          "each answer, tokens/s |"
    yield "|---|---|---|---|---|---|"
    found = [("the first, beside answers", beside(engine, choice, next(seeds)))]
    for _ in range(REPEATS):
        speed = choice.prompt / long_prompt(engine, choice, next(seeds))
        found += [("alone", (None, speed, None)), ("beside answers", beside(engine, choice, next(seeds)))]
        own = max(own or 0, speed)                  # alone, nothing but a disturbance makes a prompt slower
    for name, (gaps, speed, each) in found:
        longest, median, each = ("-",) * 3 if gaps is None else (
            f"{1e3 * gaps.max():.1f}", f"{1e3 * np.median(gaps):.1f}", f"{each:.1f}")
        yield f"| {name} | {longest} | {median} | {speed:.0f} | {speed / own:.3f} | {each} |"


def beside(engine, choice, seed):
    """(gaps, speed, each): a long prompt beside answers. gaps: seconds between two tokens of an answer, of all answers;
    speed: tokens/s of the prompt; each: tokens/s of an answer meanwhile."""
    answers = [engine.submit(prompt(1000 * seed + i, SHORT, None)) for i in range(choice.answers)]
    while min(answer.n_generated for answer in answers) < BEGUN:
        time.sleep(0.01)
    begin = time.perf_counter()
    seconds = long_prompt(engine, choice, seed)
    time.sleep(ARRIVES)                             # for the gaps that end behind the prompt
    times = [np.array(answer.token_times) for answer in answers]
    for answer in answers:
        answer.cancel()
        answer.wait()
    end, gaps, n = begin + seconds, [], 0
    for each in times:
        inside = (each[1:] > begin) & (each[:-1] < end)
        gaps.append(np.diff(each)[inside])
        n += int(((each > begin) & (each <= end)).sum())
    return np.concatenate(gaps), choice.prompt / seconds, n / len(answers) / seconds


def long_prompt(engine, choice, seed) -> float:
    """Seconds until the first token after a long prompt."""
    generation = engine.submit(prompt(seed, choice.prompt, 1))
    generation.wait()
    return generation.token_times[0] - generation.started


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
    run_program(main)
