"""Score qengine-10m on held-out examples of every task, by running it.

    python models/evaluate.py                                     # the shipped file, on qengine
    python models/evaluate.py FILE.gguf --tasks facts recall --n 100 --card emulated --json scores.json
    python models/evaluate.py --torch CHECKPOINT                  # in PyTorch, MTP drafts too

Answers are greedy; tasks.score judges them. The table has a column for each language, and JSON that fits its
schema has a row of its own beside JSON that is right.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import tasks  # noqa: E402

ROOT = Path(__file__).resolve().parent
FILE = ROOT / "qengine-10m-Q8_0.gguf"
RECALL_LENGTHS = (1000, 4000)
OTHER_LENGTH = 400       # tokens of context for tasks other than recall
MAX_ANSWER = 256
CONTEXT = 5632           # the longest context and its answer
SLOTS = 8                # answers at a time on qengine
BATCH = 64               # and in PyTorch
BATCH_TOKENS = 65536
LANGUAGES = {"en": "English", "ko": "Korean"}
N_WRONG = 20             # wrong answers of a section that are kept


def sections(names=None) -> dict[str, tuple[str, int]]:
    """What is scored: name -> (task, length). Recall has two sections; plain text has no answers."""
    chosen = {}
    for name in names or [name for name in tasks.TASKS if name != "text"]:
        if name == "recall":
            chosen |= {f"recall {length:,}": (name, length) for length in RECALL_LENGTHS}
        else:
            chosen[name] = (name, OTHER_LENGTH)
    return chosen


def held_out(task: str, length: int, n: int, seed: int = 0) -> list:
    """n held-out examples, always the same."""
    rng = random.Random(f"held out {task} {length} {seed}")
    return [tasks.TASKS[task][1](rng, True, length) for _ in range(n)]


def score(name: str, examples: list, texts: list[str]) -> dict[str, dict]:
    """Section -> its result. JSON has two: whether the values are right, and whether they fit the schema."""
    scores = {name: judged(tasks.score, examples, texts)}
    if name == "json":
        scores["json, valid"] = judged(tasks.json_is_valid, examples, texts)
    return scores


def judged(judge, examples: list, texts: list[str]) -> dict:
    """{"n", "right", "by_language": {"en": [right, n], "ko": ...}, "wrong": a few of the wrong answers}."""
    rights = [judge(example, text) for example, text in zip(examples, texts, strict=True)]
    by_language = {}
    for lang in LANGUAGES:
        chosen = [right for example, right in zip(examples, rights) if example.lang == lang]
        by_language[lang] = [sum(chosen), len(chosen)]
    wrong = [{"prompt": tasks.render(example, for_generation=True)[-400:], "answer": text}
             for example, text, right in zip(examples, texts, rights) if not right]
    return {"n": len(rights), "right": sum(rights), "by_language": by_language, "wrong": wrong[:N_WRONG]}


def show_scores(scores: dict) -> str:
    """A table: a row for each section, and at the end the drafts where there were any."""
    rows = [["", "right", "of", *LANGUAGES.values()]]
    for name, result in scores.items():
        if name == "mtp_acceptance":
            rows.append(["MTP drafts", share(result)])
        else:
            by_language = [share(right / n) if n else "" for right, n in result["by_language"].values()]
            rows.append([name, share(result["right"] / result["n"]), str(result["n"]), *by_language])
    return "\n".join((f"{first:14}" + "".join(f"{text:>10}" for text in rest)) for first, *rest in rows)


def share(x: float) -> str:
    return f"{100 * x:.1f} %"


def note(name: str, started: float):
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


# ---- qengine -------------------------------------------------------------------------------------------


def engine_scores(model: str | Path, n: int, names=None, card: str | None = None) -> dict:
    import qengine

    engine = qengine.load(model, card=card, ctx=CONTEXT, slots=SLOTS)
    scores = {}
    for name, (task, length) in sections(names).items():
        examples, started = held_out(task, length, n), time.monotonic()
        requests = [qengine.Request(engine.encode(engine.template.render(
            example.messages[:-1], example.tools, enable_thinking=example.thinking)), max_tokens=MAX_ANSWER)
            for example in examples]
        generations = [engine.submit(request) for request in requests]
        texts = ["".join(event.text for event in generation) for generation in generations]
        scores |= score(name, examples, texts)
        note(name, started)
    engine.close()
    return scores


# ---- PyTorch -------------------------------------------------------------------------------------------


def torch_scores(network, tokenizer, n: int, names=None) -> dict:
    """The same in PyTorch, and "mtp_acceptance", the share of first drafts that greedy decoding accepts."""
    scores, accepted, drafted = {}, 0, 0
    for name, (task, length) in sections(names).items():
        examples, started = held_out(task, length, n), time.monotonic()
        prompts = [tokenizer.encode(tasks.render(example, for_generation=True)).ids for example in examples]
        answers = generate(network, prompts, tokenizer.token_to_id("<|im_end|>"))
        for prompt, answer in zip(prompts, answers):
            hits = drafts_accepted(network, prompt, answer)
            accepted, drafted = accepted + hits, drafted + max(0, len(answer) - 1)
        texts = [to_text(tokenizer, answer) for answer in answers]
        scores |= score(name, examples, texts)
        note(name, started)
    return scores | {"mtp_acceptance": accepted / max(1, drafted)}


def to_text(tokenizer, ids: list[int]) -> str:
    """The answer as qengine shows it: tags as text, and no <|im_end|>."""
    return tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")


def generate(network, prompts: list[list[int]], end: int, max_tokens: int = MAX_ANSWER) -> list[list[int]]:
    """Greedy answers to prompts of token ids, `end` included where it came."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers, batch = {}, []
    for i in by_length:
        batch.append(i)
        if len(batch) == BATCH or len(batch) * len(prompts[i]) > BATCH_TOKENS or i == by_length[-1]:
            texts = _generate_batch(network, [prompts[i] for i in batch], end, max_tokens)
            answers |= dict(zip(batch, texts, strict=True))
            batch = []
    return [answers[i] for i in range(len(prompts))]


def _generate_batch(network, prompts, end, max_tokens):
    """Prompts are at the end of their rows; what fills a row before is another document, thus never seen."""
    import torch

    from models.network import CHUNK, dense_mask

    device = network.output_norm.weight.device
    width = -(-max(map(len, prompts)) // CHUNK) * CHUNK
    ids, position = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = torch.tensor(prompt)
        position[row] = torch.arange(width)
        position[row, width - len(prompt):] = torch.arange(len(prompt))
    ids, position = ids.to(device), position.to(device)
    start = (torch.arange(width, device=device) - position)[:, -1]
    caches = [{} for _ in network.trunk]
    tokens, ended = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        hidden = network.hidden(ids, position, dense_mask(position), caches)[:, -1:]
        for n in range(max_tokens):
            token = network.logits(hidden).argmax(2)
            tokens.append(token)
            ended |= token[:, 0] == end
            if n % 8 == 7 and ended.all():
                break
            at = torch.arange(width + n + 1, device=device)
            mask = (at >= start[:, None])[:, None, None]
            hidden = network.hidden(token, position[:, -1:] + n + 1, mask, caches)
    answers = torch.cat(tokens, 1).tolist()
    return [answer[:answer.index(end) + 1] if end in answer else answer for answer in answers]


def drafts_accepted(network, prompt: list[int], answer: list[int]) -> int:
    """How many of the answer's tokens but the first the MTP block foretold, one step before the trunk."""
    import torch

    from models.network import CHUNK, dense_mask

    device = network.output_norm.weight.device
    text = prompt + answer
    ids = torch.tensor([text + [0] * (-len(text) % CHUNK)], device=device)
    position = torch.arange(ids.shape[1], device=device)[None]
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        mask = dense_mask(position)
        hidden = network.hidden(ids, position, mask)
        drafts = network.logits(network.draft_hidden(ids, position, mask, hidden))[0].argmax(1).tolist()
    return sum(drafts[t - 1] == text[t] for t in range(len(prompt) + 1, len(text)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(FILE))
    parser.add_argument("--tasks", nargs="+", choices=list(tasks.TASKS))
    parser.add_argument("--n", type=int, default=100, help="examples per task")
    parser.add_argument("--card", help="as for qengine.py")
    parser.add_argument("--torch", metavar="CHECKPOINT", help="score this checkpoint in PyTorch instead")
    parser.add_argument("--json", metavar="FILE", help="write the scores there, with some wrong answers")
    options = parser.parse_args()
    if options.torch:
        import torch

        from models.train import load_checkpoint
        checkpoint = load_checkpoint(options.torch)
        checkpoint.network.to("cuda" if torch.cuda.is_available() else "cpu")
        scores = torch_scores(checkpoint.network, checkpoint.tokenizer, options.n, options.tasks)
    else:
        scores = engine_scores(options.model, options.n, options.tasks, options.card)
    print(show_scores(scores))
    if options.json:
        Path(options.json).write_text(json.dumps(scores, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
