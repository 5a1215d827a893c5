"""Train qengine-10m: tokenizer, data, network, tower, checkpoint, loss curve.

    python models/train.py --start FILE.gguf --tower MMPROJ.gguf --minutes 9               # on from files, on an H200
    python models/train.py --minutes 50 --rate 3e-3                                        # or from scratch
    python models/train.py --start FILE.gguf --tower MMPROJ.gguf --minutes 11 --part 8 \\
        --compiled compiled.bin                                                            # or 8 minutes of 11, and
    python models/train.py --minutes 11 --resume checkpoint --out checkpoint-2 \\
        --compiled compiled.bin                                                            # the others
    python models/train.py --steps 2 --trial                                               # does it work, on a CPU?

Training text and pictures are made on the fly by models/tasks. At first the tower alone has lessons (lessons.py): it
tells what each block of a picture shows. Then the network sees what the tower makes of pictures, and both are trained
on conversations of all tasks, with lessons beside them. A checkpoint is a folder of files of at most 16 MB; it knows
how much of the run is done, so that parts are one run. It is written every two minutes, so that a run that is killed
loses no more.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import compiled, data, tasks  # noqa: E402
from models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from models.evaluate import show_scores, torch_scores  # noqa: E402
from models.export import PROJECTOR, read_gguf, read_tokenizer, read_tower  # noqa: E402
from models.lessons import Lessons, show_facts  # noqa: E402
from models.network import Network, Seen, Shape  # noqa: E402
from models.tower import Tower, TowerShape  # noqa: E402

TOKENIZER_TEXTS = 40_000
TEXT_WEIGHT = 0.1            # of a token outside the answers, in the loss
MTP_WEIGHT = 0.3             # of the MTP block's loss
LESSON_WEIGHT = 0.5          # of the lessons' loss beside that of conversations
ROW_LENGTH = 2.0             # root mean square of a tower's row, by that of an embedding: a row says more than a token
RATE = 7e-4                  # of conversations, at most; from scratch 3e-3
WARM_UP_STEPS = 50
COOLDOWN = 0.65              # share of a phase in which the learning rate falls
REPORT_STEPS = 20            # between two points of the loss history; five times as many in lessons
KEPT = 200                   # units of lessons that are looked at again
SAVE_MINUTES = 2.0           # of training between two checkpoints


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run whose rows have one shape, so that nothing is compiled in its midst."""

    start: float            # the share of the run that is done when it begins
    layout: data.Layout
    units: int              # of rows in a step
    contexts: tuple | None = None   # from which step on, contexts of up to how many tokens; None: lessons
    rate: float | None = None       # at most, where it is not the run's
    last: float = 0.0       # share of the rate that is left at its end

    def longest_context(self, step: int) -> int:
        """Tokens, which may be a fifth more."""
        return max(length for start, length in self.contexts if start <= step)


# Lessons first, which a tower needs before conversations tell it anything; their head is a new one.
LESSONS, TALKS = data.Layout(0, 128, 12), data.Layout(2, 20_480, 12)
PHASES = (Phase(0.0, LESSONS, 1, None, 2.5e-3, 0.2), Phase(0.32, TALKS, 2, ((0, 16_800),)))
TRIAL = (Phase(0.0, data.Layout(0, 128, 1), 1, None, 3e-3),
         Phase(0.5, data.Layout(2, 512, 1), 1, ((0, 300),)))     # of --trial
TRIAL_TEXTS = 1000


# ---- optimisers ----------------------------------------------------------------------------------------


class Muon:
    """Steps along the momentum's nearest orthogonal matrix, for matrices (Keller Jordan, "Muon", 2024).

    Scaled by 0.2 sqrt(larger side), which makes a step as large as Adam's, with weight decay (Liu et al.,
    arXiv 2502.16982). Matrices of a shape are one stack: shape -> momentum [n, rows, columns].
    """

    def __init__(self, parameters, momentum: float = 0.95, decay: float = 0.1):
        self.momentum, self.decay = momentum, decay
        self.groups = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {shape: torch.zeros(len(group), *shape, device=group[0].device)
                        for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float):
        for shape, group in self.groups.items():
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer = self.buffers[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(buffer, self.momentum)) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Roughly U V^T of each matrix U S V^T of a stack, by five Newton-Schulz steps of fifth order."""
    wide = x.shape[1] <= x.shape[2]
    y = (x if wide else x.mT).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return (y if wide else y.mT).float()


# Rows that stand for themselves.
NOT_MATRICES = ("token_embd.weight", "output.weight", "position_embd.weight", "told.weight")


class Optimizer:
    """Muon for matrices, Adam for the rest: embeddings, positions, norms, biases, convolutions, decays."""

    def __init__(self, *networks: torch.nn.Module):
        matrices, rest = [], []
        for name, parameter in (pair for network in networks for pair in network.named_parameters()):
            is_matrix = parameter.ndim == 2 and min(parameter.shape) >= 64 and not name.endswith(NOT_MATRICES)
            (matrices if is_matrix else rest).append(parameter)
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0, fused=rest[0].is_cuda)

    def step(self, rate: float):
        self.muon.step(rate)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        for group in self.muon.groups.values():
            for parameter in group:
                parameter.grad = None

    def _momenta(self) -> dict[str, torch.Tensor]:
        return {f"muon.{rows}x{columns}": buffer for (rows, columns), buffer in self.muon.buffers.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it must remember, by name."""
        kept = self._momenta()
        for i, state in self.adam.state_dict()["state"].items():
            kept |= {f"adam.{i}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        return kept

    def load(self, tensors: dict[str, torch.Tensor], step: int) -> bool:
        """Goes on from what was remembered after so many steps, or tells that there is nothing, or nothing of these
        networks: a part may have ended where a phase does."""
        momenta = self._momenta()
        if {name: t.shape for name, t in tensors.items() if name.startswith("muon.")} != {
                name: buffer.shape for name, buffer in momenta.items()}:
            return False
        for name, buffer in momenta.items():
            buffer.copy_(tensors[name])
        state = self.adam.state_dict()
        for i in state["param_groups"][0]["params"]:
            state["state"][i] = {key: tensors[f"adam.{i}.{key}"].float() for key in ("exp_avg", "exp_avg_sq")}
            state["state"][i]["step"] = torch.tensor(float(step))
        self.adam.load_state_dict(state)
        return True


# ---- training ------------------------------------------------------------------------------------------


def on(device: str, *arrays: np.ndarray | torch.Tensor) -> list[torch.Tensor]:
    """Copies that do not wait for what the device does."""
    return [pinned(device, array).to(device, non_blocking=True) for array in arrays]


def pinned(device: str, array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """In memory from which a card reads by itself."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array).pin_memory() if device == "cuda" else torch.from_numpy(array)


class Ahead:
    """Batches of rows, of which the next is fetched while a step runs: the pixels of one take milliseconds to copy."""

    def __init__(self, batches: data.Batches, device: str):
        self.batches, self.device = batches, device
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.next = self.thread.submit(self._fetch)

    def _fetch(self) -> data.Rows:
        rows = next(self.batches)
        return rows._replace(patches=pinned(self.device, rows.patches))

    def __next__(self) -> data.Rows:
        rows, self.next = self.next.result(), self.thread.submit(self._fetch)
        return rows

    def close(self):
        self.thread.shutdown()
        self.batches.close()


def seen_by(tower: Tower, rows: data.Rows, device: str) -> Seen:
    """The pictures of packed rows, as the network takes them."""
    return _seen(tower(*_pictures(rows, device)), rows, device)


def _pictures(rows: data.Rows, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    patches, grid = on(device, rows.patches, rows.grid)
    return patches, grid.long()


def _seen(made: torch.Tensor, rows: data.Rows, device: str) -> Seen:
    """made: the tower's rows [picture rows, P / 4, hidden]."""
    tokens = np.flatnonzero(rows.places >= 0)
    tokens, places, rope = on(device, tokens, rows.places.reshape(-1)[tokens].astype(np.int64), rows.rope)
    return Seen(rope.long(), places, made.flatten(0, 1).index_select(0, tokens))


class Sums(NamedTuple):
    """What a step adds to a point of the history."""

    tasks: torch.Tensor     # sums of the answers' losses per task, and their counts
    draft: torch.Tensor     # the MTP loss on answers
    lesson: torch.Tensor    # the loss of lessons


def weighted_losses(checkpoint: Checkpoint, rows: data.Rows, device: str) -> tuple[torch.Tensor, Sums]:
    """(loss to minimise, what is told of it) of conversations with their pictures."""
    network = checkpoint.network
    ids, position, kind, task, labels = (each.long() for each in on(device, *rows[:4], rows.labels))
    targets, kind, task = ids.roll(-1, 1), kind.roll(-1, 1), task.roll(-1, 1)
    kind = kind * (position.roll(-1, 1) != 0)  # nothing predicts another document's first token
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        made = checkpoint.tower(*_pictures(rows, device))
        loss, draft_loss = network(ids, position, targets, _seen(made, rows, device))
        lesson = checkpoint.lessons(made, labels)
    weight = torch.where(kind == data.TARGET, 1.0, TEXT_WEIGHT * (kind == data.TEXT))
    total = ((loss + MTP_WEIGHT * draft_loss) * weight).sum() / weight.sum().clamp(min=1)
    answers = (kind == data.TARGET).float()
    sums = torch.bincount(task.flatten(), (loss.detach() * answers).flatten(), len(tasks.TASKS))
    counts = torch.bincount(task.flatten(), answers.flatten(), len(tasks.TASKS))
    on_answers = (draft_loss.detach() * answers).sum() / answers.sum().clamp(min=1)
    return total + LESSON_WEIGHT * lesson, Sums(torch.stack([sums, counts]), on_answers, lesson.detach())


class Pupil:
    """Gives a tower lessons: each step has a unit of new pictures and one that was there before."""

    def __init__(self, checkpoint: Checkpoint, device: str):
        self.checkpoint, self.device = checkpoint, device
        self.rng, self.kept = random.Random(f"kept {checkpoint.seed} {checkpoint.step}"), collections.deque(maxlen=KEPT)
        length = checkpoint.network.token_embd.weight.square().mean().sqrt().item()
        checkpoint.lessons.length = ROW_LENGTH * length

    def losses(self, rows: data.Rows) -> tuple[torch.Tensor, Sums]:
        new = on(self.device, rows.patches, rows.grid, rows.labels)
        self.kept.append(new)
        patches, grid, labels = (torch.cat(pair) for pair in zip(new, self.rng.choice(self.kept)))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            self.made, self.labels = self.checkpoint.tower(patches, grid.long()), labels.long()
            loss = self.checkpoint.lessons(self.made, self.labels)
        none = torch.zeros(2, len(tasks.TASKS), device=self.device)
        return loss, Sums(none, torch.zeros((), device=self.device), loss.detach())

    def right(self) -> list:
        """How well each fact of the last step was told, [right, of]."""
        return self.checkpoint.lessons.right(self.made.detach(), self.labels).tolist()


def rate_factor(done: float, last: float, cooldown: float = COOLDOWN) -> float:
    """The learning rate factor when `done` of a phase is done: 1, then a line to `last` over its last `cooldown`."""
    return 1 - (1 - last) * max(0.0, done - 1 + cooldown) / cooldown


def train(checkpoint: Checkpoint, steps: int | None, minutes: float | None, *, phases: tuple[Phase, ...] = PHASES,
          rate: float = RATE, workers: int = 1, device: str = "cpu", log=print, part: float = math.inf,
          save=lambda checkpoint: None):
    """Train the checkpoint's network and tower, in place, on to so many steps or minutes in all, or for a part of
    them. save: called with the checkpoint every SAVE_MINUTES, and at the end, also that of an error in the data."""
    for each in (checkpoint.network, checkpoint.tower, checkpoint.lessons):
        each.to(device).train()
    progress = Progress(checkpoint, log)
    started, first_step = time.monotonic() - 60 * checkpoint.minutes, checkpoint.step
    stop, saved = part + (checkpoint.step if steps else checkpoint.minutes), checkpoint.minutes
    crew = data.Workers(checkpoint.tokenizer, workers)
    phase, batches, optimizer = None, None, None
    try:
        while (done := checkpoint.step if steps else checkpoint.minutes) < min(stop, steps or minutes):
            done /= steps or minutes
            if phase is not (phase := [each for each in phases if each.start <= done][-1]):
                if batches:
                    progress.report()
                    batches.close()
                    checkpoint.optimizer = {}
                batches = Ahead(data.Batches(crew, checkpoint.seed, checkpoint.step, phase.units,
                                             phase.contexts and phase.longest_context, phase.layout), device)
                pupil = None if phase.contexts else Pupil(checkpoint, device)
                optimizer = Optimizer(checkpoint.tower, checkpoint.lessons, *([] if pupil else [checkpoint.network]))
                begun = -WARM_UP_STEPS if optimizer.load(checkpoint.optimizer, checkpoint.step) else checkpoint.step
                end = min([each.start for each in phases if each.start > phase.start], default=1.0)
            now = (phase.rate or rate) * min(1, (checkpoint.step - begun + 1) / WARM_UP_STEPS) * rate_factor(
                (done - phase.start) / (end - phase.start), phase.last)
            asked = time.monotonic()
            rows = next(batches)
            progress.waited += time.monotonic() - asked
            loss, sums = pupil.losses(rows) if pupil else weighted_losses(checkpoint, rows, device)
            loss.backward()
            optimizer.step(now)
            checkpoint.step += 1
            checkpoint.minutes = (time.monotonic() - started) / 60
            progress.add(rows, sums, now)
            if checkpoint.step == first_step + 1:
                log(show_point(progress.point()))
            if checkpoint.step % (REPORT_STEPS * (5 if pupil else 1)) == 0:
                progress.report(pupil.right() if pupil else None)
            if checkpoint.minutes - saved >= SAVE_MINUTES:
                saved, checkpoint.optimizer = checkpoint.minutes, optimizer.tensors()
                save(checkpoint)
        progress.report(pupil and pupil.right())
    finally:
        if batches:
            batches.close()
        crew.close()
        if optimizer:
            checkpoint.optimizer = optimizer.tensors()
        save(checkpoint)


class Progress:
    """Sums up the losses of steps and reports them: a point of the history and a line of text."""

    def __init__(self, checkpoint: Checkpoint, log):
        self.checkpoint, self.log = checkpoint, log
        last = checkpoint.history[-1] if checkpoint.history else {"tokens": 0, "pictures": 0}
        self.tokens, self.pictures = last["tokens"], last["pictures"]
        self._begin()

    def _begin(self):
        self.started, self.waited, self.sums = time.monotonic(), 0.0, []
        self.first = self.tokens, self.pictures

    def add(self, rows: data.Rows, sums: Sums, rate: float):
        """Of a step. What it `waited` for data, in seconds, is added by the caller."""
        self.tokens += rows.ids.size
        self.pictures += int(sum(len(np.unique(each[each >= 0])) for each in rows.grid[:, ::4, 4]))
        self.sums.append(sums)
        self.rate = rate

    def point(self) -> dict:
        sums, counts = sum(each.tasks for each in self.sums)
        means = dict(zip(tasks.TASKS, (sums / counts).tolist()))
        seconds = time.monotonic() - self.started
        return {"step": self.checkpoint.step, "tokens": self.tokens, "pictures": self.pictures, "rate": self.rate,
                "minutes": self.checkpoint.minutes,
                "speed": (self.tokens - self.first[0]) / seconds, "seen": (self.pictures - self.first[1]) / seconds,
                "waited": self.waited / seconds, "mtp": self.sums[-1].draft.item(),
                "lesson": sum(each.lesson for each in self.sums).item() / len(self.sums),
                "loss": {name: mean for name, mean in means.items() if not math.isnan(mean)}}

    def report(self, right: list | None = None):
        """right: how well a tower told each fact."""
        if self.sums:
            self.checkpoint.history.append(self.point() | ({"right": right} if right else {}))
            self.log(show_point(self.checkpoint.history[-1]))
            self._begin()


def show_point(point: dict) -> str:
    losses = " ".join(f"{name} {loss:.3f}" for name, loss in point["loss"].items())
    return (f"step {point['step']}: {60 * point['minutes']:.0f} s, {point['tokens'] / 1e6:.1f} M tokens, "
            f"{point['speed'] / 1e3:.0f} k/s, {point['pictures'] / 1e3:.0f} k pictures, {point['seen']:.0f}/s, "
            f"{point['waited']:.0%} waiting for data, rate {point['rate']:.1e}, lesson {point['lesson']:.3f}, "
            f"mtp {point['mtp']:.3f}, {losses} {show_facts(point.get('right', []))}")


def draw_history(history: list, path: Path):
    """The loss on answers per task, and that of lessons, over the minutes of training, as a picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in tasks.TASKS:
        points = [(point["minutes"], point["loss"][name]) for point in history if name in point["loss"]]
        if points:
            axes.plot(*np.array(points).T, label=name, linewidth=1)
    axes.plot([point["minutes"] for point in history], [point["lesson"] for point in history], "k--", label="lessons",
              linewidth=1)
    axes.set(xlabel="minutes of training", ylabel="loss per answer token, or per label (nats)", yscale="log")
    axes.legend(loc="upper right", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def new_checkpoint(seed: int, workers: int, n_texts: int = TOKENIZER_TEXTS, start: str | None = None,
                   tower: str | None = None) -> Checkpoint:
    """The network and the tokenizer of the file `start`, or an untrained network and a tokenizer trained on samples of
    the text; the tower of the file `tower`, or an untrained one."""
    torch.manual_seed(seed)
    shape = Shape()
    if start:
        tokenizer, old = read_tokenizer(start), read_gguf(start)
        network = Network(dataclasses.replace(old.shape, context=shape.context))
        network.load_parameters(dict(old.named_parameters()))
    else:
        texts = data.sample_many_texts(seed, n_texts, workers)
        tokenizer, network = data.train_tokenizer(texts, shape.n_vocab), Network(shape)
        print(f"tokenizer: {tokenizer.get_vocab_size()} tokens from {len(texts)} texts", flush=True)
    hidden = network.shape.hidden
    eyes = read_tower(tower) if tower else Tower(TowerShape(hidden=hidden))
    return Checkpoint(network, tokenizer, seed, tower=eyes, lessons=Lessons(hidden))


# What conversations are marked with, and pictures in them.
NEEDED_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", data.PAD, "<|vision_end|>")


def complaint_of_start(path: str) -> str | None:
    """Why a run cannot begin with the network and the tokenizer of a file; None if it can."""
    fields, complaint = _fields(path, "qwen35")
    if complaint:
        return complaint
    if _value(fields, "qwen35.nextn_predict_layers") != 1:
        return f"{path} needs one draft block (qwen35.nextn_predict_layers), which is trained with the network"
    missing = sorted(set(NEEDED_TOKENS) - set(_value(fields, "tokenizer.ggml.tokens") or ()), key=NEEDED_TOKENS.index)
    return f"the vocabulary of {path} lacks {', '.join(missing)}" if missing else None


def complaint_of_tower(path: str, start: str) -> str | None:
    """Why the tower of a file cannot see for the network of the file `start`; None if it can."""
    fields, complaint = _fields(path, "clip")
    if complaint:
        return complaint
    if (kind := _value(fields, "clip.projector_type")) != PROJECTOR:
        return f"{path} has a tower of the kind {kind}; --tower takes {PROJECTOR}"
    made = _value(fields, "clip.vision.projection_dim")
    taken = _value(_fields(start, "qwen35")[0], "qwen35.embedding_length")
    return None if made == taken else f"{path} makes rows of {made} numbers, and the network of {start} takes {taken}"


def _fields(path: str, architecture: str) -> tuple[dict, str | None]:
    """(the metadata of a GGUF file, None), or ({}, why it is none of this architecture)."""
    if not Path(path).is_file():
        return {}, f"{path} is not there, or no file"
    try:
        fields = gguf.GGUFReader(path).fields
    except Exception as error:      # the reader trusts the file, and raises what NumPy does
        return {}, f"{path} cannot be read as GGUF: {error}"
    found = _value(fields, "general.architecture")
    if found != architecture:
        return {}, f"{path} has the architecture {found}, and {architecture} is needed"
    return fields, None


def _value(fields: dict, name: str):
    """None where the file has no such field."""
    return fields[name].contents() if name in fields else None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="train for so long, with what was done before --resume")
    parser.add_argument("--steps", type=int, help="or for so many steps")
    parser.add_argument("--part", type=float, default=math.inf,
                        help="stop after so many of these minutes or steps, to --resume")
    parser.add_argument("--start", metavar="FILE", help="a model file with whose network and tokenizer a run begins")
    parser.add_argument("--tower", metavar="FILE", help="the file with the tower of a run that starts from a file")
    parser.add_argument("--resume", metavar="DIR", help="go on from this checkpoint")
    parser.add_argument("--compiled", metavar="FILE",
                        help="keep here what is compiled for the card, and begin with what another part has kept here. "
                             "The file holds pickles, which can run any program: name only your own, never one that "
                             "came with somebody's checkpoint")
    parser.add_argument("--out", metavar="DIR", default="checkpoint", help="where the checkpoint goes")
    parser.add_argument("--rate", type=float, default=RATE,
                        help=f"learning rate of conversations: {RATE} unless given, which is for a network that was "
                             "trained before")
    parser.add_argument("--seed", type=int, help="of a new run: 1 unless given")
    parser.add_argument("--trial", action="store_true",
                        help=f"rows of {TRIAL[1].layout.n_tokens} tokens and few pictures, a tokenizer of "
                             f"{TRIAL_TEXTS} texts, to try it on a CPU")
    parser.add_argument("--scores", type=int, default=0,
                        help="held-out examples per task to score at last, none unless given")
    return parser


def parse(parser: argparse.ArgumentParser, device: str) -> argparse.Namespace:
    """The options of a run on a device. Ends the program where they do not go together."""
    options = parser.parse_args()
    if (options.minutes is None) == (options.steps is None):
        parser.error("give --minutes or --steps")
    if options.resume and options.seed is not None:
        parser.error("the seed is that of the checkpoint to resume")
    if options.tower and not options.start:
        parser.error("--tower is for a run with --start")
    if options.resume and options.start:
        parser.error("the checkpoint to resume has its own network: leave --start out")
    if Path(options.out).exists() and options.out != options.resume:
        parser.error(f"{options.out} exists already")
    complaint = options.start and complaint_of_start(options.start)
    complaint = complaint or options.tower and complaint_of_tower(options.tower, options.start)
    if complaint:
        parser.error(complaint)
    if options.compiled and device == "cpu":
        parser.error("--compiled is for a GPU: without one nothing is compiled")
    if options.compiled and (Path(options.compiled).is_dir() or not Path(options.compiled).parent.is_dir()):
        parser.error(f"--compiled {options.compiled} is no file, or in a folder that is not there")
    return options


def main():
    parser, device = build_parser(), "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(parser, device)
    phases, n_texts = (TRIAL, TRIAL_TEXTS) if options.trial else (PHASES, TOKENIZER_TEXTS)
    workers = max(1, os.cpu_count() - 2)
    torch.set_float32_matmul_precision("high")
    checkpoint = (load_checkpoint(options.resume) if options.resume else
                  new_checkpoint(1 if options.seed is None else options.seed, workers, n_texts, options.start,
                                 options.tower))
    if checkpoint.tower is None:
        parser.error(f"{options.resume} has no tower, which is trained together with the network")
    if device == "cuda":
        if options.compiled:
            compiled.find(options.compiled)
        compiled.compile_blocks(checkpoint)

    def save(each):
        save_checkpoint(options.out, each)
        if options.compiled:
            compiled.keep(options.compiled)
    train(checkpoint, options.steps, options.minutes, phases=phases, rate=options.rate, workers=workers, device=device,
          log=lambda line: print(line, flush=True), part=options.part,
          save=save)
    draw_history(checkpoint.history, Path(options.out) / "loss.png")
    if options.scores:
        scores = torch_scores(checkpoint.network, checkpoint.tokenizer, options.scores, tower=checkpoint.tower)
        (Path(options.out) / "scores.json").write_text(json.dumps(scores, indent=1))
        print(show_scores(scores))


if __name__ == "__main__":
    main()
