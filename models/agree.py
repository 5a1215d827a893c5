"""Compare qengine with llama.cpp and transformers on one model file: greedy answers, also to pictures, and perplexity.

    python models/agree.py [FILE.gguf] [--mmproj MMPROJ.gguf] [--checkpoint DIR]

The reference is transformers, which runs the file's dequantised weights in float32. qengine and llama.cpp multiply by
activations of 8 bits, so they may choose another token where the reference's two best tokens are nearly equal.

How nearly is measured. The margin is the difference of the reference's two best logits, and the noise is the rms error
of that difference in the other program, over all positions before its answer departs from the reference's. If any
answer departs where the margin is above three times the noise, the exit code is 1.

Prompts with pictures are answered where there is a tower; llama.cpp is asked for text alone. With --checkpoint,
perplexity is also taken with the weights as they were trained.
"""

import argparse
import importlib.util
import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import qengine  # noqa: E402
from models import tasks  # noqa: E402
from models.evaluate import FILE, TOWER_FILE, request_of  # noqa: E402

N_PROMPTS = 20               # half of them Korean
N_SEEN = 6                   # prompts with pictures
N_TOKENS = 64
NOISE = 3                # times the rms difference of two margins: what 8-bit rounding may decide
WINDOW = 2048                # tokens of held-out text that are scored at a time
TEXT_TOKENS = 16_000


def held_out_prompts() -> list[str]:
    """Rendered prompts of the short tasks in turn."""
    names = [name for name in tasks.TASKS if name not in ("recall", "text", "pictures")]
    rng = random.Random("agree")
    return [tasks.render(tasks.TASKS[names[i // 2 % len(names)]][1](rng, True, None, ("en", "ko")[i % 2]),
                         for_generation=True) for i in range(N_PROMPTS)]


def held_out_pictures() -> list:
    """Examples with pictures."""
    rng, found = random.Random("agree"), []
    while len(found) < N_SEEN:
        example = tasks.TASKS["pictures"][1](rng, True, None, ("en", "ko")[len(found) % 2])
        found += [example] if example.pictures else []
    return found


class Prompt(NamedTuple):
    ids: list[int]          # a picture's tokens are a run of pads
    pictures: tuple = ()    # Pictures of engine/images.py


def reference_answer(model, prompt: Prompt, pad: int) -> tuple[list[int], np.ndarray]:
    """(greedy tokens, logits [N_TOKENS, n_vocab] they were chosen from) of transformers."""
    import torch

    from models.export import transformers_pictures
    seen = transformers_pictures([each.pixels for each in prompt.pictures], prompt.ids, pad) if prompt.pictures else {}
    out = model.generate(torch.tensor([prompt.ids]), do_sample=False, max_new_tokens=N_TOKENS,
                         return_dict_in_generate=True, output_logits=True, **seen)
    return out.sequences[0, len(prompt.ids):].tolist(), torch.cat(out.logits).numpy()


class QEngine:
    def __init__(self, path: str, mmproj: str | None):
        self.engine = qengine.load(path, ctx=WINDOW, progress=False, mmproj=mmproj)

    def answer(self, prompt):
        request = qengine.Request(prompt.ids, max_tokens=N_TOKENS, ignore_eos=True, pictures=prompt.pictures)
        return [delta.token_id for delta in self.engine.submit(request)]

    def logits(self, ids, pictures=()):
        return self.engine.evaluate(ids, pictures=pictures)


class LlamaCpp:
    def __init__(self, path: str):
        import llama_cpp

        self.llama = llama_cpp.Llama(path, n_ctx=WINDOW, logits_all=True, verbose=False)

    def answer(self, prompt):
        self.llama.reset()
        tokens = self.llama.generate(prompt.ids, temp=0.0)
        return [next(tokens) for _ in range(N_TOKENS)]

    def logits(self, ids, pictures=()):
        self.llama.reset()
        self.llama.eval(ids)
        return np.array(self.llama.scores[:len(ids)])


def compare(name: str, engine, prompts, references) -> bool:
    """Prints how many answers equal the reference's, and for each that departs from it the margin there, beside the
    noise of margins up to there. Returns whether each departs where the reference's margin is below NOISE times the
    noise."""
    leaves, errors = [], []
    for i, (prompt, (answer, logits)) in enumerate(zip(prompts, references, strict=True)):
        ours = engine.answer(prompt)
        theirs = engine.logits(prompt.ids + answer, prompt.pictures)[len(prompt.ids) - 1:-1]
        rows, best = np.arange(N_TOKENS)[:, None], np.argsort(logits, 1)[:, :-3:-1]
        margin, margin_ours = (np.subtract(*x[rows, best].T) for x in (logits, theirs))
        step = next((t for t in range(N_TOKENS) if ours[t] != answer[t]), None)
        errors.extend((margin - margin_ours)[:step])
        if step is not None:
            leaves.append((i, step, margin[step]))
    noise = float(np.sqrt(np.mean(np.square(errors))))
    print(f"{name}: {len(prompts) - len(leaves)} of {len(prompts)} answers of {N_TOKENS} tokens identical; "
          f"noise of the margin {noise:.3f} rms")
    for i, step, margin in leaves:
        verdict = "within the noise" if margin <= NOISE * noise else "BEYOND THE NOISE"
        print(f"  prompt {i} leaves at token {step}, where the reference's margin is {margin:.3f}: {verdict}")
    return all(margin <= NOISE * noise for *_, margin in leaves)


def references_of(model, prompts: list[Prompt], pad: int) -> list:
    model.generation_config.eos_token_id = None
    return [reference_answer(model, prompt, pad) for prompt in prompts]


def mean_loss(logits_of, ids: list[int]) -> float:
    """Mean negative log-likelihood in nats over windows of a text, of each window's tokens but the first."""
    losses = []
    for start in range(0, len(ids) - WINDOW + 1, WINDOW - 1):
        window = ids[start:start + WINDOW]
        logits = logits_of(window[:-1]).astype(np.float64)
        top = logits.max(1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
        losses.append(log_sum - logits[np.arange(WINDOW - 1), window[1:]])
    return float(np.concatenate(losses).mean())


def transformers_logits(model):
    import torch

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].numpy()
    return logits


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(FILE))
    parser.add_argument("--mmproj", default=TOWER_FILE if TOWER_FILE.exists() else None,
                        help="the file of its tower; by default that of the shipped model, where it is there")
    parser.add_argument("--checkpoint", metavar="DIR", help="the checkpoint that the file was exported from")
    options = parser.parse_args()

    from models.export import read_gguf, read_tower, to_transformers, to_transformers_that_sees
    network, ours = read_gguf(options.model), QEngine(options.model, options.mmproj)
    model, pad = to_transformers(network), ours.engine.tokenizer.control["<|image_pad|>"]
    prompts = [Prompt(ours.engine.encode(text)) for text in held_out_prompts()]
    references = references_of(model, prompts, pad)
    agrees = compare("qengine", ours, prompts, references)
    if importlib.util.find_spec("llama_cpp"):
        compare("llama.cpp", LlamaCpp(options.model), prompts, references)
    else:
        print("llama.cpp is left out: llama-cpp-python is not installed")
    if options.mmproj:
        requests = [request_of(ours.engine, "pictures", example) for example in held_out_pictures()]
        prompts = [Prompt(request.prompt_ids, request.pictures) for request in requests]
        sees = to_transformers_that_sees(network, read_tower(options.mmproj), pad)
        agrees &= compare("qengine, pictures", ours, prompts, references_of(sees, prompts, pad))

    ids = ours.engine.tokenizer.encode(tasks.heldout_text(random.Random("perplexity"), TEXT_TOKENS))
    losses = {"qengine, Q8_0": mean_loss(ours.logits, ids),
              "transformers, the file's weights": mean_loss(transformers_logits(model), ids)}
    if options.checkpoint:
        from models.checkpoint import load_checkpoint
        trained = to_transformers(load_checkpoint(options.checkpoint).network)
        losses["transformers, weights as trained"] = mean_loss(transformers_logits(trained), ids)
    for name, loss in losses.items():
        difference = 100 * np.expm1(losses["qengine, Q8_0"] - loss)
        print(f"perplexity {np.exp(loss):.4f}, from which qengine's differs by {difference:+.3f} %: {name}")
    ours.engine.close()
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
