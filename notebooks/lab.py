"""What the notebooks share: counting, figures on record, tables, plots and the frame of an exercise. No kernel is here,
no check either."""

import base64
import io
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))           # for kernels and qengine, wherever Jupyter started

import matplotlib.pyplot as plt
import PIL.Image
from IPython.display import display

import qengine
from kernels.bench import seconds_per_call
from kernels.card import LaunchError
from kernels.emulated.estimate import PIPES, SECTOR

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6fb5", "#e08214", "#2e9e6b", "#c8483d", "#8a63b8", "#8c8c8c"
COLOURS = BLUE, ORANGE, GREEN, PURPLE, RED, GREY
# An opaque, light background: readable on a dark page as well as on a light one.
plt.rcParams.update({"figure.facecolor": "#fbfbf9", "axes.facecolor": "#fbfbf9", "figure.dpi": 80, "font.size": 9,
                     "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3,
                     "axes.axisbelow": True, "axes.prop_cycle": plt.cycler(color=COLOURS)})


# ---- counting and timing -----------------------------------------------------------------------------------

def count(card, launch, model):
    """What one call of launch() does, counted on an emulated card that has as many SMs as `model` (a CardModel): its
    only kernel.Counted of kernels/emulated/counting.py."""
    if _rehearsing:
        with card.checking():
            launch()
        raise Rehearsed
    own, card.n_sms = card.n_sms, model.n_sms
    try:
        with card.counting() as log:
            launch()
    finally:
        card.n_sms = own
    launched, = log
    return launched


def microseconds(card, launch):
    """What one call of launch() takes on a card, without Python: see kernels/bench.py."""
    return 1e6 * seconds_per_call(card, launch)


def tokens_per_second(engine, prompt, n=64):
    """How fast an engine answers, the prompt left out: of three answers of n tokens the fastest."""
    speeds = []
    for _ in range(3):
        answer = iter(engine.submit(qengine.Request(engine.encode(prompt), max_tokens=n, ignore_eos=True)))
        next(answer)
        start = time.perf_counter()
        speeds.append(sum(1 for _ in answer) / (time.perf_counter() - start))
    return max(speeds)


def measured(section, words):
    """The numbers that follow `words` in a section of benchmarks/results.md: up to the end of the row of a table, or of
    the sentence. section: its heading, or how the heading begins. LookupError: the section does not say these words."""
    text = (ROOT / "benchmarks" / "results.md").read_text()
    found = re.search(rf"^(#+) {re.escape(section)}.*?(?=^#{{1,3}} |\Z)", text, re.M | re.S)
    after = found and re.search(rf"{re.escape(words)}(.*?)(?:\n\||\n\n|[.:;](?:\s|$)|\Z)", found[0], re.S)
    if not after:
        raise LookupError(f"benchmarks/results.md, section {section}, does not say: {words}")
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", after[1])]


# ---- tables ------------------------------------------------------------------------------------------------

def table(head, *rows):
    """Prints a table: the first column to the left, the others to the right."""
    rows = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        print("  ".join(cells).rstrip())


def compare(versions, model):
    """Prints what kernels did and their estimated time on a card; versions: name -> Counted."""
    counts = [counted.counts for counted in versions.values()]
    rows = [[name.rstrip("_"), *(getattr(c, name) for c in counts)]
            for name in PIPES if any(getattr(c, name) for c in counts) and name != "move"]
    rows.append(["all instructions", *(sum(getattr(c, name) for name in PIPES if name != "move") for c in counts)])
    rows.append(["sectors read, MB", *(f"{SECTOR * c.read_sectors / 1e6:.2f}" for c in counts)])
    rows.append(["different sectors, MB", *(f"{SECTOR * c.distinct_sectors / 1e6:.2f}" for c in counts)])
    estimates = [counted.estimate(model) for counted in versions.values()]
    rows.append(["ESTIMATED µs", *(f"{1e6 * e.seconds:.1f}" for e in estimates)])
    rows.append(["limited by", *(e.limiting for e in estimates)])
    table([f"warp instructions; {model.name}", *versions], *rows)


# ---- plots -------------------------------------------------------------------------------------------------

def show(words):
    """Shows the figure that was drawn last, in 128 colours, which make a small file. words: what is in it, for readers
    who do not see it: where no picture can be shown, and where descriptions of pictures are read out."""
    drawn, file = io.BytesIO(), io.BytesIO()
    plt.savefig(drawn, format="png", bbox_inches="tight")
    plt.close()
    PIL.Image.open(drawn).convert("RGB").quantize(128, dither=PIL.Image.Dither.NONE).save(file, "png", optimize=True)
    png = base64.b64encode(file.getvalue()).decode()
    display({"image/png": png, "text/plain": words}, metadata={"image/png": {"alt": words}}, raw=True)


def plot_estimates(versions, model, title=""):
    """A panel for each kernel: how long each part of the card would be busy; the longest is the estimate."""
    estimates = {name: counted.estimate(model).per_pipe_seconds for name, counted in versions.items()}
    parts = [part for part in next(iter(estimates.values())) if any(e[part] > 0 for e in estimates.values())]
    figure, panels = plt.subplots(1, len(estimates), figsize=(11, 0.6 + 0.24 * len(parts)), sharey=True)
    longest = 1e6 * max(max(e.values()) for e in estimates.values())
    for axes, (name, seconds) in zip(panels, estimates.items()):
        times = [1e6 * seconds[part] for part in parts]
        axes.barh(parts, times, color=[RED if t == max(times) else BLUE for t in times])
        for part, t in zip(parts, times):
            axes.text(t, part, f" {t:.1f}", va="center", fontsize=8)
        axes.set(title=name, xlim=(0, 1.2 * longest), xlabel="estimated µs")
        axes.grid(axis="y", visible=False)
    panels[0].invert_yaxis()
    figure.suptitle(title or f"How long each part of a {model.name} would be busy (estimates; the longest decides)")
    plt.show()


# ---- exercises ---------------------------------------------------------------------------------------------

class Rehearsed(Exception):
    """Ends a rehearsal where something is counted: until there, nothing was touched that must not be."""


_rehearsing = False


def rehearse(check, answer):
    """Runs a check up to its first count(), with every access of that launch checked. Raises LaunchError where one is
    wrong: counted, it would end the reader's Python."""
    global _rehearsing
    _rehearsing = True
    try:
        check(answer)
    except Rehearsed:
        pass
    finally:
        _rehearsing = False


def attempt(check, answer):
    """Runs the check of an exercise on the reader's answer, or says that there is none yet. What the check asserts
    is told, and what a kernel must not touch, and the notebook goes on."""
    if answer is None:
        print("not solved yet")
        return
    try:
        rehearse(check, answer)
        check(answer)
        print("solved")
    except (AssertionError, LaunchError) as error:
        print(f"not right yet: {error}")
        if re.search(r"\bnan\b", str(error)):              # what results are poisoned with
            print("(nan: something was never written, or made of what was not)")


def refuses(check, wrong):
    """Fails if the check of an exercise is satisfied with a wrong answer."""
    try:
        check(wrong)
    except AssertionError:
        return
    raise RuntimeError("the check is satisfied with a wrong answer")
