"""Score qengine-10m on held-out examples of every task, by running it.

    python models/evaluate.py                                     # the shipped file, on qengine
    python models/evaluate.py FILE.gguf --tasks facts recall --n 100 --card emulated --json scores.json
    python models/evaluate.py FILE.gguf --mmproj MMPROJ.gguf      # with another tower than the shipped one
    python models/evaluate.py --torch                             # the same file in PyTorch, MTP drafts too
    python models/evaluate.py --torch CHECKPOINT                  # or a checkpoint
    python models/evaluate.py --torch --n 1000 --processes 4 --within 280 --json scores.json   # four sections at once
    python models/evaluate.py --torch FORMER.gguf --mmproj "" --n 1000 --former scores.json     # beside former scores

Answers are greedy, and tasks.score judges them. The table has a row for each section of tasks and a column for each
language. Some examples of a section have a second row of their own: answers that have to be calls or to tell results,
JSON that fits its schema, facts asked in the words of a trained question, and facts asked in other words. The sections
"new words" and "new fields" have tools and fields that training never names; "later" asks for facts in the midst of a
conversation, "after a picture" once a picture was talked about. "Compact results" of tools are JSON without spaces. In
"objects, enforced" the answer is held to a schema that the prompt does not show, as by a server, so only qengine
scores it.

In PyTorch, each section also tells how many first drafts greedy decoding accepts, and the last row is the perplexity of
held-out text. There several processes may share the sections; one that is not done in time is left out and named, and
those that are done are written down as they come.
"""

import argparse
import functools
import json
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import tasks  # noqa: E402

ROOT = Path(__file__).resolve().parent
FILE = ROOT / "qengine-10m-Q8_0.gguf"
TOWER_FILE = ROOT / "qengine-10m-mmproj-Q8_0.gguf"
RECALL_LENGTHS = (1000, 4000, 16_384)
OTHER_LENGTH = 400       # tokens of context for tasks other than recall
MAX_ANSWER = 256
CONTEXT = 20_480         # the longest context and its answer
SLOTS = 8                # answers at a time on qengine
# And in PyTorch, with at most so many tokens of prompts: a card waits for launches unless there are many.
BATCHES = {"cuda": (256, 131_072), "cpu": (64, 65_536)}
LANGUAGES = {"en": "English", "ko": "Korean"}
N_WRONG = 20             # wrong answers of a section that are kept
TEXT_TOKENS = 16_000     # of held-out text, for perplexity
WINDOW = 2048            # of which are scored at a time
SECTIONS = ({name: make for name, (_, make) in tasks.TASKS.items() if name != "text"}
            | tasks.LATER | tasks.NEW_WORDS | tasks.COMPACT | tasks.ENFORCED | tasks.SIGHT)

# Rows of their own: which of a section's examples they are of.
KINDS = {"facts": {"trained words": tasks.asks_in_trained_words,
                   "other words": lambda example: not tasks.asks_in_trained_words(example)},
         "tools": {"calls": lambda example: example.expect["kind"] == "calls",
                   "results": lambda example: example.expect["kind"] == "values"}}


def sections(names=None) -> dict[str, tuple]:
    """What is scored: name -> (generator, length). Recall has two sections; plain text has no answers."""
    chosen = {}
    for name in names or SECTIONS:
        if name == "recall":
            chosen |= {f"recall {length:,}": (tasks.TASKS[name][1], length) for length in RECALL_LENGTHS}
        else:
            chosen[name] = (SECTIONS[name], OTHER_LENGTH)
    return chosen


def held_out(name: str, make, length: int, n: int, seed: int = 0) -> list:
    """n held-out examples of a section, always the same."""
    rng = random.Random(f"held out {name} {length} {seed}")
    return [make(rng, True, length) for _ in range(n)]


def score(name: str, examples: list, texts: list[str]) -> dict[str, dict]:
    """Section -> its result, and some results of their own: JSON that fits its schema, kinds of examples."""
    scores = {name: judged(tasks.score, examples, texts)}
    if name.startswith("json"):
        scores[f"{name}, valid"] = judged(tasks.json_is_valid, examples, texts)
    for kind, belongs in KINDS.get(name, {}).items():
        chosen = [pair for pair in zip(examples, texts, strict=True) if belongs(pair[0])]
        if chosen:
            scores[f"{name}, {kind}"] = judged(tasks.score, *zip(*chosen))
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


def show_scores(scores: dict, former: dict | None = None) -> str:
    """A table: a row for each section, with accepted drafts where there were any, and the perplexity. former: scores of
    another file, which get a column."""
    former = former or {}
    rows = [["", "right", "of", *LANGUAGES.values(), "drafts", *(["former"] if former else [])]]
    for name, result in scores.items():
        if name == "perplexity":
            rows.append([name, f"{result:.4f}", *([""] * 4 + [f"{former[name]:.4f}"] if name in former else [])])
            continue
        by_language = [share(right / n) if n else "" for right, n in result["by_language"].values()]
        drafts = share(result["accepted"] / result["drafted"]) if result.get("drafted") else ""
        before = [share(former[name]["right"] / former[name]["n"])] if name in former else []
        rows.append([name, share(result["right"] / result["n"]), str(result["n"]), *by_language, drafts, *before])
    return "\n".join((f"{first:34}" + "".join(f"{text:>10}" for text in rest)) for first, *rest in rows)


def share(x: float) -> str:
    return f"{100 * x:.1f} %"


def note(name: str, started: float):
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


# ---- qengine -------------------------------------------------------------------------------------------


def engine_scores(model: str | Path, n: int, names=None, card: str | None = None,
                  mmproj: str | Path | None = None, kv: str | None = None) -> dict:
    """Sections that need a longer context than the model's, or eyes that it has not, are left out and named. kv: how
    keys and values are kept, see kernels/kv_formats.py."""
    import qengine

    context = min(CONTEXT, qengine.GGUF(model).get("qwen35.context_length", int))
    engine = qengine.load(model, card=card, ctx=context, slots=SLOTS, mmproj=mmproj, kv=kv)
    scores = {}
    for name, (make, length) in sections(names).items():
        examples, started = held_out(name, make, length, n), time.monotonic()
        if length > context or engine.eyes is None and any(example.pictures for example in examples):
            print(f"{name} is left out: {'a context' if length > context else 'pictures'} beyond this model",
                  file=sys.stderr, flush=True)
            continue
        generations = [engine.submit(request_of(engine, name, example)) for example in examples]
        texts = ["".join(delta.text for delta in generation) for generation in generations]
        scores |= score(name, examples, texts)
        note(name, started)
    engine.close()
    return scores


def grammar_of(example) -> str:
    """A grammar of the values that fit the example's schema, with or without a space behind commas and colons."""
    from llguidance import LLMatcher

    from engine.constraints import JSON_STYLE

    return LLMatcher.grammar_from_json_schema(example.expect["schema"], defaults=JSON_STYLE)


def request_of(engine, section, example):
    """The request for an example's answer, with its pictures."""
    import qengine
    from engine.images import Picture, prompt_fields

    ids = engine.encode(engine.template.render(example.messages[:-1], example.tools,
                                               enable_thinking=example.thinking))
    pictures = tuple(Picture.of(picture.draw()) for picture in example.pictures)
    return qengine.Request(**prompt_fields(ids, pictures, engine.eyes), max_tokens=MAX_ANSWER,
                           grammar=grammar_of(example) if section in tasks.ENFORCED else None)


# ---- PyTorch -------------------------------------------------------------------------------------------


def torch_scores(network, tokenizer, n: int, names=None, tower=None) -> dict:
    """The same in PyTorch, with the drafts of sections without pictures, "accepted" of "drafted", and "perplexity".
    Sections that need a tower are left out and named where there is none."""
    scores = {}
    for name in sections(names):
        scores |= torch_section(network, tokenizer, tower, name, n)
    return scores | {"perplexity": perplexity(network, tokenizer)}


def torch_section(network, tokenizer, tower, name: str, n: int) -> dict:
    """The scores of one section."""
    from models.data import prompt_of

    if name in tasks.ENFORCED:
        print(f"{name} is left out: qengine enforces schemas", file=sys.stderr, flush=True)
        return {}
    (make, length), started = sections()[name], time.monotonic()
    examples = held_out(name, make, length, n)
    sees = any(example.pictures for example in examples)
    if sees and tower is None:
        print(f"{name} is left out: pictures need a tower", file=sys.stderr, flush=True)
        return {}
    prompts = [prompt_of(tokenizer, example) for example in examples]
    answers = generate(network, prompts, tokenizer.token_to_id("<|im_end|>"), tower=tower)
    texts = [to_text(tokenizer, answer) for answer in answers]
    scores = score(name, examples, texts)
    if not sees:
        pairs = zip((prompt.ids.tolist() for prompt in prompts), answers, strict=True)
        scores[name]["accepted"] = sum(drafts_accepted(network, *pair) for pair in pairs)
        scores[name]["drafted"] = sum(max(0, len(answer) - 1) for answer in answers)
    note(name, started)
    return scores


def scores_of_processes(files: tuple, n: int, names=None, processes: int = 1, within: float | None = None,
                        write=lambda scores: None) -> dict:
    """What `torch_scores` has, by several processes that share a card. files: as `load` takes them. within: seconds.
    write: called with all scores that are there whenever one has come."""
    started, scores = time.monotonic(), {}
    longest_first = sorted(sections(names), key=lambda name: -sections()[name][1])
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting = {name: pool.apply_async(_score_in_process, (files, name, n))
                   for name in (*longest_first, "perplexity")}
        for name, job in waiting.items():
            try:
                left = within if within is None else max(0.0, started + within - time.monotonic())
                scores |= job.get(left)
            except multiprocessing.TimeoutError:
                print(f"{name} is left out: not done within {within:.0f} s", file=sys.stderr, flush=True)
            except Exception as error:      # the scores of the others are worth having
                print(f"{name} failed: {error!r}", file=sys.stderr, flush=True)
            write(scores)
    return scores


def _score_in_process(files: tuple, name: str, n: int) -> dict:
    network, tokenizer, tower = _loaded(files)
    if name == "perplexity":
        return {name: perplexity(network, tokenizer)}
    return torch_section(network, tokenizer, tower, name, n)


@functools.cache
def _loaded(files: tuple) -> tuple:
    """As `load` has it, on a card if there is one."""
    import torch

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network, tokenizer, tower = load(*files)
    return network.to(device), tokenizer, tower.to(device) if tower is not None else None


def perplexity(network, tokenizer, n_tokens: int = TEXT_TOKENS) -> float:
    """Of the text and in the windows of agree.py."""
    import torch

    from models.network import dense_mask

    ids = to_ids(tokenizer, tasks.heldout_text(random.Random("perplexity"), n_tokens))
    device, total, n = network.output_norm.weight.device, 0.0, 0
    for start in range(0, len(ids) - WINDOW + 1, WINDOW - 1):
        window = torch.tensor([ids[start:start + WINDOW]], device=device)
        position = torch.arange(WINDOW, device=device)[None]
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            logits = network.logits(network.hidden(window, position, dense_mask(position)))[0, :-1]
            total += torch.nn.functional.cross_entropy(logits.double(), window[0, 1:], reduction="sum").item()
        n += WINDOW - 1
    return math.exp(total / n)


def to_ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def to_text(tokenizer, ids: list[int]) -> str:
    """The answer as qengine shows it: tags as text, and no <|im_end|>."""
    return tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")


def generate(network, prompts: list, end: int, max_tokens: int = MAX_ANSWER, tower=None) -> list[list[int]]:
    """Greedy answers to prompts (data.Document), `end` included where it came."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    most, most_tokens = BATCHES[network.output_norm.weight.device.type]
    answers, batch = {}, []
    for i in by_length:
        batch.append(i)
        if len(batch) == most or len(batch) * len(prompts[i].ids) > most_tokens or i == by_length[-1]:
            texts = _generate_batch(network, [prompts[i] for i in batch], end, max_tokens, tower)
            answers |= dict(zip(batch, texts, strict=True))
            batch = []
    return [answers[i] for i in range(len(prompts))]


def _generate_batch(network, prompts, end, max_tokens, tower=None):
    """Prompts are at the end of their rows; what fills a row before is another document, thus never seen."""
    import torch

    from models.network import CHUNK, Seen, dense_mask

    device = network.output_norm.weight.device
    width = -(-max(len(prompt.ids) for prompt in prompts) // CHUNK) * CHUNK
    ids, position = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    rope, places, seen = torch.zeros(len(prompts), 3, width, dtype=torch.int64), [], []
    for row, prompt in enumerate(prompts):
        first = width - len(prompt.ids)
        ids[row, first:] = torch.from_numpy(prompt.ids)
        position[row] = torch.arange(width)
        position[row, first:] = torch.arange(len(prompt.ids))
        rope[row, :, first:] = torch.from_numpy(prompt.rope.copy())
        for start, picture in prompt.pictures:
            seen.append(look_at(tower, picture))
            places.append(row * width + first + start + torch.arange(len(seen[-1]), device=device))
    ids, position, rope = (each.to(device) for each in (ids, position, rope))
    nothing = rope.new_zeros(0), torch.zeros(0, network.shape.hidden, device=device)
    pictures = (torch.cat(places), torch.cat(seen)) if seen else nothing
    start = (torch.arange(width, device=device) - position)[:, -1]
    caches = [{} for _ in network.trunk]
    tokens, ended = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        hidden = network.hidden(ids, position, dense_mask(position), caches, Seen(rope, *pictures))[:, -1:]
        for n in range(max_tokens):
            token = network.logits(hidden).argmax(2)
            tokens.append(token)
            ended |= token[:, 0] == end
            if n % 8 == 7 and ended.all():
                break
            at = torch.arange(width + n + 1, device=device)
            mask = (at >= start[:, None])[:, None, None]
            seen = Seen(rope[..., -1:] + n + 1, *nothing)
            hidden = network.hidden(token, position[:, -1:] + n + 1, mask, caches, seen)
    answers = torch.cat(tokens, 1).tolist()
    return [answer[:answer.index(end) + 1] if end in answer else answer for answer in answers]


def look_at(tower, picture):
    """The tower's rows [n, hidden] of one picture."""
    import torch

    from models.data import SIZE, cut
    from models.tower import dense_picture_mask

    device, pixels = tower.mm["2"].weight.device, picture.draw()
    patches, places = cut(pixels)
    size = torch.tensor([pixels.shape[0] // SIZE, pixels.shape[1] // SIZE, 0]).expand(len(places), 3)
    grid = torch.cat([torch.from_numpy(places), size], 1).to(device)[None]
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        return tower(torch.from_numpy(patches).to(device)[None], grid, dense_picture_mask(grid))[0]


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


def load(path: str | Path, mmproj: str | Path | None = None) -> tuple:
    """(network, tokenizer, tower or None) of a model file and its tower's, or of a checkpoint."""
    if Path(path).is_dir():
        from models.checkpoint import load_checkpoint
        checkpoint = load_checkpoint(path)
        return checkpoint.network, checkpoint.tokenizer, checkpoint.tower
    from models.export import read_gguf, read_tokenizer, read_tower
    return read_gguf(path).eval(), read_tokenizer(path), read_tower(mmproj).eval() if mmproj else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(FILE))
    parser.add_argument("--tasks", nargs="+", choices=list(SECTIONS), metavar="SECTION",
                        help=", ".join(SECTIONS))
    parser.add_argument("--n", type=int, default=100, help="examples per task")
    parser.add_argument("--mmproj", default=TOWER_FILE,
                        help="the file of its tower: that of the shipped model unless given")
    parser.add_argument("--card", help="as for qengine.py")
    parser.add_argument("--kv", metavar="FORMAT", help="as for qengine.py")
    parser.add_argument("--torch", metavar="CHECKPOINT", nargs="?", const="",
                        help="score in PyTorch instead: the model file, or this checkpoint")
    parser.add_argument("--processes", type=int, default=1, help="in PyTorch, how many share the sections")
    parser.add_argument("--within", type=float, metavar="SECONDS",
                        help="in PyTorch, leave out what is not done by then")
    parser.add_argument("--json", metavar="FILE", help="write the scores there, with some wrong answers")
    parser.add_argument("--former", metavar="FILE", help="show the scores of this file, written by --json, beside them")
    options = parser.parse_args()

    def write(scores):
        if options.json:
            Path(options.json).write_text(json.dumps(scores, indent=1, ensure_ascii=False))
    if options.torch is not None:
        scores = scores_of_processes((options.torch or options.model, options.mmproj), options.n, options.tasks,
                                     options.processes, options.within, write)
    else:
        scores = engine_scores(options.model, options.n, options.tasks, options.card, options.mmproj,
                               options.kv)
    if not scores:
        sys.exit("no section was scored")
    print(show_scores(scores, options.former and json.loads(Path(options.former).read_text())))
    write(scores)


if __name__ == "__main__":
    main()
