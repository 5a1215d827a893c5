"""Train qengine-10m from scratch: tokenizer, data, network, tower, checkpoint, loss curve.

    python models/train.py --minutes 50                        # all of it at once, on an H100 or H200
    python models/train.py --minutes 50 --part 25              # or the first 25 minutes of it,
    python models/train.py --minutes 50 --part 25 --resume checkpoint --out checkpoint-2    # and 25 more
    python models/train.py --steps 2 --trial                   # whether it works, on a CPU

Training text and pictures are made on the fly by models/tasks. A checkpoint is a folder of files of at most 16 MB; it
knows how much of the run is done, so that parts are one run. Rows are short at first and long at last, see PHASES: a
step has about as many tokens in each phase, and a part that ends where a phase does compiles for one shape alone.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import data, tasks  # noqa: E402
from models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from models.evaluate import show_scores, torch_scores  # noqa: E402
from models.network import Network, Seen, Shape  # noqa: E402
from models.tower import Tower, TowerShape  # noqa: E402

TOKENIZER_TEXTS = 40_000
TEXT_WEIGHT = 0.1            # of a token outside the answers, in the loss
MTP_WEIGHT = 0.3             # of the MTP block's loss
WARM_UP_STEPS = 50
COOLDOWN = 0.65              # share of a run in which the learning rate falls to 0
REPORT_STEPS = 20            # between two points of the loss history
UNITS = 4                    # of rows in a step


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run whose rows have one shape, so that nothing is compiled in its midst."""

    start: float            # the share of the run that is done when it begins
    layout: data.Layout
    contexts: tuple         # from which step on, contexts of up to how many tokens, which may be a fifth more

    def longest_context(self, step: int) -> int:
        """Short contexts first: copying is learnt there, then far away."""
        return max(length for start, length in self.contexts if start <= step)


PHASES = (Phase(0.0, data.Layout.of(4608, 6), ((0, 600), (300, 1500), (600, 3700))),
          Phase(0.5, data.Layout.of(20_480, 2), ((0, 16_800),)))
TRIAL = (Phase(0.0, data.Layout(2, 512, 1), ((0, 300),)),)     # of --trial
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


NOT_MATRICES = ("token_embd.weight", "output.weight", "position_embd.weight")   # rows that stand for themselves


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it must remember, by name."""
        kept = {f"muon.{rows}x{columns}": buffer for (rows, columns), buffer in self.muon.buffers.items()}
        for i, state in self.adam.state_dict()["state"].items():
            kept |= {f"adam.{i}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        return kept

    def load(self, tensors: dict[str, torch.Tensor], step: int):
        for (rows, columns), buffer in self.muon.buffers.items():
            buffer.copy_(tensors[f"muon.{rows}x{columns}"])
        state = self.adam.state_dict()
        for i in state["param_groups"][0]["params"]:
            state["state"][i] = {key: tensors[f"adam.{i}.{key}"].float() for key in ("exp_avg", "exp_avg_sq")}
            state["state"][i]["step"] = torch.tensor(float(step))
        self.adam.load_state_dict(state)


# ---- training ------------------------------------------------------------------------------------------


def seen_by(tower: Tower, rows: data.Rows, device: str) -> Seen:
    """The pictures of packed rows, as the network takes them."""
    tokens = np.flatnonzero(rows.places >= 0)
    tokens, places, rope, patches, grid = (
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (tokens, rows.places.reshape(-1)[tokens].astype(np.int64), rows.rope, rows.patches, rows.grid))
    made = tower(patches, grid.long()).flatten(0, 1)
    return Seen(rope.long(), places, made.index_select(0, tokens))


def weighted_losses(network: Network, tower: Tower, rows: data.Rows, device: str):
    """(loss to minimise, [sums of the answers' losses per task, their counts], MTP loss on answers)."""
    ids, position, kind, task = (torch.from_numpy(array).to(device, torch.int64, non_blocking=True)
                                 for array in rows[:4])
    targets, kind, task = ids.roll(-1, 1), kind.roll(-1, 1), task.roll(-1, 1)
    kind = kind * (position.roll(-1, 1) != 0)  # nothing predicts another document's first token
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss, draft_loss = network(ids, position, targets, seen_by(tower, rows, device))
    weight = torch.where(kind == data.TARGET, 1.0, TEXT_WEIGHT * (kind == data.TEXT))
    total = ((loss + MTP_WEIGHT * draft_loss) * weight).sum() / weight.sum().clamp(min=1)
    answers = (kind == data.TARGET).float()
    sums = torch.bincount(task.flatten(), (loss.detach() * answers).flatten(), len(tasks.TASKS))
    counts = torch.bincount(task.flatten(), answers.flatten(), len(tasks.TASKS))
    on_answers = (draft_loss.detach() * answers).sum() / answers.sum().clamp(min=1)
    return total, torch.stack([sums, counts]), on_answers


def rate_factor(done: float, cooldown: float) -> float:
    """The learning rate factor when `done` of a run is done: 1, then a line to 0 over its last `cooldown`."""
    return min(1.0, max(0.0, 1 - done) / cooldown) if cooldown else 1.0


def train(checkpoint: Checkpoint, steps: int | None, minutes: float | None, *, cooldown: float = COOLDOWN,
          phases: tuple[Phase, ...] = PHASES, units: int = UNITS, rate: float = 3e-3, workers: int = 1,
          device: str = "cpu", log=print, part: float = math.inf):
    """Train the checkpoint's network and tower, in place, on to so many steps or minutes in all, or for a part of them.
    units: of rows in a step."""
    network, tower = (each.to(device).train() for each in (checkpoint.network, checkpoint.tower))
    optimizer = Optimizer(network, tower)
    if checkpoint.optimizer:
        optimizer.load(checkpoint.optimizer, checkpoint.step)
    progress = Progress(checkpoint, log)
    started, first_step = time.monotonic() - 60 * checkpoint.minutes, checkpoint.step
    stop = part + (checkpoint.step if steps else checkpoint.minutes)
    phase, batches = None, None
    try:
        while (done := checkpoint.step if steps else checkpoint.minutes) < min(stop, steps or minutes):
            done /= steps or minutes
            if phase is not (phase := [each for each in phases if each.start <= done][-1]):
                if batches:
                    batches.close()
                batches = data.Batches(checkpoint.tokenizer, checkpoint.seed, checkpoint.step, units, workers,
                                       phase.longest_context, phase.layout)
            now = rate * min(1, (checkpoint.step + 1) / WARM_UP_STEPS) * rate_factor(done, cooldown)
            asked = time.monotonic()
            rows = next(batches)
            progress.waited += time.monotonic() - asked
            loss, task_sums, draft_loss = weighted_losses(network, tower, rows, device)
            loss.backward()
            optimizer.step(now)
            checkpoint.step += 1
            checkpoint.minutes = (time.monotonic() - started) / 60
            progress.add(rows.ids.size, task_sums, draft_loss, now)
            if checkpoint.step == first_step + 1:
                log(show_point(progress.point()))
            if checkpoint.step % REPORT_STEPS == 0:
                progress.report()
        progress.report()
    finally:  # also what an error in the data leaves can be saved
        if batches:
            batches.close()
        checkpoint.optimizer = optimizer.tensors()


class Progress:
    """Sums up the losses of steps and reports them: a point of the history and a line of text."""

    def __init__(self, checkpoint: Checkpoint, log):
        self.checkpoint, self.log = checkpoint, log
        self.tokens = checkpoint.history[-1]["tokens"] if checkpoint.history else 0
        self._begin()

    def _begin(self):
        self.started, self.waited, self.first, self.sums = time.monotonic(), 0.0, self.tokens, 0

    def add(self, n_tokens: int, task_sums, draft_loss, rate: float):
        """Of a step. What it `waited` for data, in seconds, is added by the caller."""
        self.tokens += n_tokens
        self.sums, self.draft_loss, self.rate = self.sums + task_sums, draft_loss, rate

    def point(self) -> dict:
        means = dict(zip(tasks.TASKS, (self.sums[0] / self.sums[1]).tolist()))
        seconds = time.monotonic() - self.started
        return {"step": self.checkpoint.step, "tokens": self.tokens, "rate": self.rate,
                "speed": (self.tokens - self.first) / seconds, "waited": self.waited / seconds,
                "mtp": self.draft_loss.item(),
                "loss": {name: mean for name, mean in means.items() if not math.isnan(mean)}}

    def report(self):
        if self.tokens > self.first:
            self.checkpoint.history.append(self.point())
            self.log(show_point(self.checkpoint.history[-1]))
            self._begin()


def show_point(point: dict) -> str:
    losses = " ".join(f"{name} {loss:.3f}" for name, loss in point["loss"].items())
    return (f"step {point['step']}: {point['tokens'] / 1e6:.1f} M tokens, {point['speed'] / 1e3:.0f} k/s, "
            f"{point['waited']:.0%} waiting for data, rate {point['rate']:.1e}, mtp {point['mtp']:.3f}, {losses}")


def draw_history(history: list, path: Path):
    """The loss on answers per task over the tokens seen, as a picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in tasks.TASKS:
        points = [(point["tokens"] / 1e6, point["loss"][name]) for point in history if name in point["loss"]]
        if points:
            axes.plot(*np.array(points).T, label=name, linewidth=1)
    axes.set(xlabel="tokens seen (millions)", ylabel="loss per answer token (nats)", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def new_checkpoint(seed: int, workers: int, n_texts: int = TOKENIZER_TEXTS) -> Checkpoint:
    """An untrained network and tower, and a tokenizer trained on samples of the text."""
    torch.manual_seed(seed)
    shape = Shape()
    texts = data.sample_many_texts(seed, n_texts, workers)
    tokenizer = data.train_tokenizer(texts, shape.n_vocab)
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens from {len(texts)} texts", flush=True)
    return Checkpoint(Network(shape), tokenizer, seed, tower=Tower(TowerShape(hidden=shape.hidden)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="train for so long, with what was done before --resume")
    parser.add_argument("--steps", type=int, help="or for so many steps")
    parser.add_argument("--part", type=float, default=math.inf,
                        help="stop after so many of these minutes or steps, to --resume")
    parser.add_argument("--cooldown", type=float, default=COOLDOWN,
                        help=f"the share of the run in which the rate falls to 0: {COOLDOWN} unless given")
    parser.add_argument("--resume", metavar="DIR", help="go on from this checkpoint")
    parser.add_argument("--out", metavar="DIR", default="checkpoint", help="where the checkpoint goes")
    parser.add_argument("--units", type=int, help=f"of about {data.UNIT_TOKENS:,} tokens a step: {UNITS} unless given")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, help="of a new run: 1 unless given")
    parser.add_argument("--trial", action="store_true",
                        help=f"one unit of {TRIAL[0].layout.n_rows} rows of {TRIAL[0].layout.n_tokens} tokens per "
                             f"step, a tokenizer of {TRIAL_TEXTS} texts, to try it on a CPU")
    parser.add_argument("--scores", type=int, default=0,
                        help="held-out examples per task to score at last, none unless given")
    options = parser.parse_args()
    if (options.minutes is None) == (options.steps is None):
        parser.error("give --minutes or --steps")
    if options.resume and options.seed is not None:
        parser.error("the seed is that of the checkpoint to resume")
    if options.units is not None and options.units < 1:
        parser.error("--units is 1 or more")
    if Path(options.out).exists() and options.out != options.resume:
        parser.error(f"{options.out} exists already")
    phases, units, n_texts = (TRIAL, 1, TRIAL_TEXTS) if options.trial else (PHASES, UNITS, TOKENIZER_TEXTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = max(1, os.cpu_count() - 2)
    torch.set_float32_matmul_precision("high")
    checkpoint = (load_checkpoint(options.resume) if options.resume else
                  new_checkpoint(1 if options.seed is None else options.seed, workers, n_texts))
    if checkpoint.tower is None:
        parser.error(f"{options.resume} has no tower, which is trained together with the network")
    if device == "cuda":
        checkpoint.network.compile_blocks()
        checkpoint.tower.compile_blocks()
    try:
        train(checkpoint, options.steps, options.minutes, cooldown=options.cooldown, phases=phases,
              units=options.units or units, rate=options.rate, workers=workers, device=device,
              log=lambda line: print(line, flush=True), part=options.part)
    finally:
        save_checkpoint(options.out, checkpoint)
    draw_history(checkpoint.history, Path(options.out) / "loss.png")
    if options.scores:
        scores = torch_scores(checkpoint.network, checkpoint.tokenizer, options.scores)
        (Path(options.out) / "scores.json").write_text(json.dumps(scores, indent=1))
        print(show_scores(scores))


if __name__ == "__main__":
    main()
