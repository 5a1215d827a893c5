"""What the notebooks share: counting, figures on record, predictions, tables, plots, drawings and the frame of a task.
Kernels and their checks are elsewhere.

How a notebook asks and shows, in this order:

    predict(...)    a cell with a blank: what do you expect?
    count(...)      what a kernel does, after every access of it was checked
    reveal(...)     the prediction beside what was counted or measured
    attempt(...)    a task: your answer, checked
"""

import base64
import contextlib
import ctypes
import dis
import functools
import html
import inspect
import io
import linecache
import os
import re
import sys
import time
import traceback
from numbers import Real
from pathlib import Path
from types import FunctionType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))           # for kernels and qengine, wherever Jupyter started

import matplotlib.pyplot as plt
import numpy as np
import PIL.Image
from IPython import get_ipython
from IPython.display import display
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from numba.cuda.cudadrv.error import CudaSupportError
from numba.cuda.errors import missing_launch_config_msg

import qengine
from benchmarks import figures
from kernels.bench import seconds_per_call
from kernels.card import ON_A_CARD, Array, LaunchError
from kernels.compile import CompileError
from kernels.configured import Configured
from kernels.emulated.estimate import PIPES, SECTOR

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3d7fc4", "#e08214", "#2e9e6b", "#d2554a", "#9370c0", "#8c8c8c"
COLOURS = BLUE, ORANGE, GREEN, PURPLE, RED, GREY
INK = "#808080"                             # lines and words: as readable on a white page as on a black one
INSIDE = "#111111"                          # words on a coloured field
plt.rcParams.update({"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
                     "legend.facecolor": "none", "legend.edgecolor": INK, "figure.dpi": 80, "font.size": 9,
                     "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3,
                     "axes.axisbelow": True, "axes.prop_cycle": plt.cycler(color=COLOURS),
                     **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor",
                                      "grid.color", "xtick.color", "ytick.color"), INK)})


# ---- counting and timing -----------------------------------------------------------------------------------

def checked(card, launch):
    """Runs launch() on an emulated card with every access checked, and leaves the card's memory as it was. Raises
    LaunchError, which names line and thread, before a wrong access happens."""
    card.synchronize()
    before = {start: ctypes.string_at(start, n_bytes) for start, (n_bytes, _) in card.allocations.items()}
    _watched.clear()
    try:
        with card.checking():
            launch()
        _known.update(_watched)
    finally:
        for start in before.keys() & card.allocations.keys():
            ctypes.memmove(start, before[start], len(before[start]))


def run(card, launch):
    """Runs launch() on a card; an emulated card checks every access. Raises LaunchError as `checked` does."""
    with card.checking() if card.kind == "emulated" else contextlib.nullcontext():
        launch()


_is_timed = False           # inside `microseconds`, after its check
_known = set()              # (kernel, blocks, threads, shapes of arrays and numbers) of launches that were found right
_watched = set()            # the same, of launches that are being checked


@contextlib.contextmanager
def _careful(configured, card, args):
    """What kernel[blocks, threads](...) of a cell runs in: on an emulated card it is checked, unless it is counted,
    recorded or timed. A check takes time and is done at once, so cells that take times and cards that do all as late as
    they may check nothing twice. What arrays hold does not count there, since kernels change it: a second launch whose
    array of indices holds others, for example pages or experts, is not checked."""
    sizes = [(arg.shape, arg.dtype) if isinstance(arg, Array) else arg for arg in args]
    what = configured.kernel, repr((configured.grid, configured.block, sizes))
    if card.kind != "emulated" or card.is_watched or (card.late or _since is not None) and what in _known:
        _watched.add(what)
        yield
        return
    if _is_timed:
        raise LaunchError(f"{configured.kernel.__name__}: its launches differ. What is timed was checked once, and so "
                          "it is launched with the same blocks, threads, shapes and numbers each time")
    if card.defers:
        yield
        return
    with card.checking():
        yield
    _known.add(what)


def count(card, launch, model):
    """What one call of launch() does, counted on an emulated card that has as many SMs as `model` (a CardModel): the
    Counted (kernels/emulated/counting.py) of its only kernel. All accesses are checked first."""
    own, card.n_sms = card.n_sms, model.n_sms
    try:
        checked(card, launch)
        with card.counting() as log:
            launch()
    finally:
        card.n_sms = own
    if len(log) != 1:
        raise AssertionError(f"{len(log)} kernels ran on this {card.name} to be counted, not one. Are the arrays on "
                             "another card? `emulated` and `card` are two")
    if log[0].counts.fp64:
        words = (f"{log[0].counts.fp64:,} instructions computed in float64, which is slow on most cards. "
                 "Is a float32(...) missing? 0.0 is a float64.")
        _box(ORANGE, words, words)
    return log[0]


def microseconds(card, launch):
    """What one call of launch() takes on a card, without Python: see kernels/bench.py. On an emulated card all accesses
    are checked before, and it is said below the cell what its times are. Raises LaunchError where a later call would
    launch otherwise than the one that was checked. Calls are recorded and then replayed, so each finds in the arrays
    what the one before it has left there: indices among that must stay right, for they are not checked again."""
    global _is_timed
    timed(card)
    if card.kind == "emulated":
        checked(card, launch)
    _is_timed = True
    try:
        return 1e6 * seconds_per_call(card, launch)
    finally:
        _is_timed = False


def tokens_per_second(engine, prompt, n=64):
    """How fast an engine answers, without the prompt: the fastest of three answers of n tokens."""
    timed()
    speeds = []
    for _ in range(3):
        answer = iter(engine.submit(qengine.Request(engine.encode(prompt), max_tokens=n, ignore_eos=True)))
        next(answer)
        start = time.perf_counter()
        speeds.append(sum(1 for _ in answer) / (time.perf_counter() - start))
    return max(speeds)


STAT = Path("/proc/stat")
_since = None               # what `_used` said when a cell began to measure times
_is_emulated = False        # whether the cell has measured times of kernels on an emulated card


def timed(card=None):
    """For cells that take times, on `card` those of kernels. What is to be known of them is said below the cell. From
    here to the end of the cell a launch like an earlier one is not checked again, whatever its arrays hold by then: an
    index beyond an array then reads or writes elsewhere, or ends Python. `checked` finds it."""
    global _since, _is_emulated
    _since = _used() if _since is None else _since
    _is_emulated = _is_emulated or bool(card and card.kind == "emulated")


def _processors():
    """Seconds that all programs have used so far, for each processor that this Python may use. A container's
    /proc/stat may list all processors of the machine. If it lacks one of the container's own, all listed ones count."""
    rows = {}
    for name, *ticks in map(str.split, STAT.read_text().splitlines()):
        if re.fullmatch(r"cpu\d+", name):
            user, nice, system, _, _, *interrupts = map(int, ticks[:7])
            rows[int(name[3:])] = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    own = os.sched_getaffinity(0)
    return [rows[number] for number in own] if own <= rows.keys() else list(rows.values())


def _used():
    """Seconds so far: of the clock, of all programs on these processors, and of this Python alone."""
    return np.array([time.perf_counter(), sum(_processors()), time.process_time()])


def _tell_disturbance(_):
    """Runs after each cell: says what times mean, if the cell has measured any."""
    global _since, _is_emulated
    if _since is not None:
        clock, everyone, own = _used() - _since
        if _is_emulated:
            words = ("These are times of your processor, which executes the kernels one instruction after the other. "
                     "They say nothing about a card: estimates and figures on record do.")
            _box(GREY, words, words)
        _since, _is_emulated = None, False
        if clock > 0.2:         # processors are counted in hundredths of a second
            disturbed_by((everyone - own) / clock)


def disturbed_by(n):
    """Says that other programs used n processors while times were measured, if n is more than a little."""
    if n > 0.1:
        words = (f"Other programs, those of a container's host too, used {n:.1f} of {len(_processors())} processors "
                 "while this cell ran. On a quiet machine its times may be shorter, and their order another.")
        _box(ORANGE, words, words)


# ---- figures on record -------------------------------------------------------------------------------------

def figure(name, row, column, n=1):
    """The n-th number of a cell of a table in benchmarks/results.md, see benchmarks/figures.py."""
    return figures.figure(name, row, column, n)


def on_record(name, *columns):
    """Prints a table of figures of benchmarks/results.md, with the card and the day. columns: which; none
    named: all."""
    source, rows = figures.record(name)
    columns = columns or tuple(next(iter(rows.values())))
    print(f"on record (benchmarks/results.md): {source}")
    table(["", *columns], *[[row, *(cells[column] for column in columns)] for row, cells in rows.items()])


# ---- predictions -------------------------------------------------------------------------------------------

class Prediction:
    """What the reader expects. guess: a number or one of `choices`; None: the reader entered nothing, or something
    that was refused."""

    def __init__(self, what, guess, choices, is_refused):
        self.what, self.guess, self.choices, self.is_refused = what, guess, choices, is_refused


def predict(what, guess, *more):
    """Keeps what the reader has put in place of None until `reveal` shows it. If this is not a number, or none of the
    choices, the reader is asked again. more: a list of choices; or the rest of a number that the reader wrote with a
    comma."""
    choices = more[0] if len(more) == 1 and isinstance(more[0], (list, tuple)) else ()
    guess = guess if choices or not more else ", ".join(map(str, (guess, *more)))
    wanted = f"one of {', '.join(map(repr, choices))}" if choices else "a number"
    by_word = {str(choice).lower(): choice for choice in choices}
    guess = by_word.get(str(guess).strip().lower(), guess) if choices else _number_in(guess)
    fits = guess in choices if choices else (
        isinstance(guess, Real) and not isinstance(guess, bool) and abs(guess) < 1e15)      # a NaN is not
    if guess is not None and not fits:
        asked = wanted if choices else f"{wanted} without commas, as 1234.5"
        _box(ORANGE, f"<b>{html.escape(what)}?</b> {html.escape(asked.capitalize())}, please; yours is "
                     f"<code>{html.escape(str(guess))}</code>.",
             f"{what}? {asked.capitalize()}, please; yours is {guess}.")
    if guess is None:
        _box(GREY, f"<b>{html.escape(what)}?</b> Your turn: put {html.escape(wanted)} in place of <code>None</code>, "
                   "run this cell, then go on.", f"{what}? Put {wanted} in place of None.")
    return Prediction(what, guess if fits else None, choices, guess is not None and not fits)


def _number_in(guess):
    """The number that a text spells, "18"; anything else as it is."""
    try:
        return float(guess) if isinstance(guess, str) else guess
    except ValueError:
        return guess


def reveal(prediction, found, unit=""):
    """Shows a prediction beside what was found: a number, or one of the choices."""
    answer, colour = f"{_show(found)} {unit}".strip(), GREY
    words = "Your prediction was refused." if prediction.is_refused else "You have made no prediction."
    if prediction.guess is not None:
        colour, verdict = judge(prediction.guess, found, bool(prediction.choices), "%" in unit + prediction.what)
        words = f"You said {_show(prediction.guess)}. {verdict}"
    _box(colour, f"<b>{html.escape(prediction.what)}: {html.escape(answer)}.</b> {html.escape(words)}",
         f"{prediction.what}: {answer}. {words}")


def _stand_in(info):
    """Runs before each cell: if the cell reveals a prediction whose own cell was skipped, makes an empty one."""
    for name in re.findall(r"\blab\.reveal\((\w+)", info.raw_cell):
        get_ipython().user_ns.setdefault(name, Prediction(name.replace("_", " "), None, (), False))


def judge(said, found, is_choice=False, is_percent=False):
    """(colour, kind words) for a prediction beside what was found. is_choice: the prediction is one of several choices.
    is_percent: its unit is per cent."""
    if is_choice or isinstance(found, str):
        return (GREEN, "Right.") if said == found else (ORANGE, "It is another one. The folded lines behind the "
                                                                "prediction, or the text below, say why.")
    if said == found or found and abs(said / found - 1) <= 0.03:
        return GREEN, "Right."
    if not found or said / found <= 0:
        return ORANGE, "Another size altogether. The arithmetic is worth a look."
    ratio, way = max(said / found, found / said), "high" if said > found else "low"
    if ratio <= 1.25:
        return GREEN, f"Close: {abs(said / found - 1):.0%} too {way}."
    if ratio <= 3:
        return BLUE, f"The right size, {ratio:.1f} times too {way}."
    factor = "Is it in per cent?" if is_percent and 80 < ratio < 125 else "Which factor is missing?"
    return ORANGE, f"{ratio:,.0f} times too {way}: a surprise, and that is what predictions are for. {factor}"


def _show(x):
    is_whole = not isinstance(x, str) and float(x).is_integer() and abs(x) < 1e15
    return x if isinstance(x, str) else f"{int(x):,}" if is_whole else f"{x:,.4g}"


def _box(colour, marked_up, plain):
    """Shows words beside a bar of colour, readable on any page. They are not printed: no test compares them."""
    style = f"border-left: 4px solid {colour}; padding: 2px 10px; margin: 2px 0"
    display({"text/html": f'<div style="{style}">{marked_up}</div>', "text/plain": plain}, raw=True)


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
    rows.append(["different ones, read or written, MB", *(f"{SECTOR * c.distinct_sectors / 1e6:.2f}" for c in counts)])
    estimates = [counted.estimate(model) for counted in versions.values()]
    rows.append(["ESTIMATED µs", *(f"{1e6 * e.seconds:.1f}" for e in estimates)])
    rows.append(["of these, the launch", *[f"{1e6 * model.launch_seconds:.1f}"] * len(estimates)])
    rows.append(["limited by", *(e.limiting for e in estimates)])
    table([f"warp instructions; {model.name}", *versions], *rows)


# ---- plots -------------------------------------------------------------------------------------------------

def show(words):
    """Shows the figure that was drawn last on a transparent ground, in 128 colours, which make a small file. words:
    what the figure shows, for readers who do not see it, because no picture can be shown or because a program reads
    descriptions aloud."""
    drawn, file = io.BytesIO(), io.BytesIO()
    plt.savefig(drawn, format="png", bbox_inches="tight")
    plt.close()
    PIL.Image.open(drawn).convert("RGBA").quantize(128, PIL.Image.Quantize.FASTOCTREE).save(file, "png", optimize=True)
    png = base64.b64encode(file.getvalue()).decode()
    display({"image/png": png, "text/plain": words}, metadata={"image/png": {"alt": words}}, raw=True)


def plot_estimates(versions, model, title=""):
    """A panel for each kernel: how long each part of the card would be busy; the longest is the estimate. Where one
    kernel takes far longer than another one, the axes are logarithmic."""
    estimates = {name: counted.estimate(model).per_pipe_seconds for name, counted in versions.items()}
    parts = [part for part in next(iter(estimates.values())) if any(e[part] > 0 for e in estimates.values())]
    _, (panels,) = plt.subplots(1, len(estimates), figsize=(11, 0.6 + 0.24 * len(parts)), sharey=True, squeeze=False)
    totals = [1e6 * max(e.values()) for e in estimates.values()]
    longest, is_log = max(totals), max(totals) > 20 * min(totals)
    left, right = (0.5, 4 * longest) if is_log else (0, 1.2 * longest)
    for axes, (name, seconds) in zip(panels, estimates.items()):
        times = [1e6 * seconds[part] for part in parts]
        axes.barh(parts, times, color=[RED if t == max(times) else BLUE for t in times])
        for part, t in zip(parts, times):
            axes.text(max(t, left), part, f" {t:.1f}", va="center", fontsize=8)
        axes.set(title=name, xscale="log" if is_log else "linear", xlim=(left, right),
                 xlabel="estimated µs" + ", logarithmic" * is_log)
        axes.grid(axis="y", visible=False)
    panels[0].invert_yaxis()
    plt.gcf().suptitle(title or f"How long each part of a {model.name} would be busy (estimates; the longest decides)")
    most = [f"{name}: {max(e, key=e.get)}, {1e6 * max(e.values()):.1f} µs" for name, e in estimates.items()]
    show(f"Bars of how long each part of a {model.name} would be busy, estimated, a panel for each kernel. The "
         f"longest: {'; '.join(most)}.")


# ---- drawings of kernels -----------------------------------------------------------------------------------

def pale(colour):
    """A colour on which dark words can be read, on any page."""
    return 0.5 + 0.5 * np.array(to_rgb(colour))


def draw_owners(owner, title, axes, x_label="", y_label="", framed=(0,)):
    """Draws who computes what: a field for each entry of `owner` (int [rows, columns]: the number of a thread, lane or
    warp). Fields of the owners in `framed` have a frame."""
    down, across = owner.shape
    for (i, j), who in np.ndenumerate(owner):
        is_framed = who in framed
        colour = COLOURS[int(who) % len(COLOURS)]
        axes.add_patch(Rectangle((j, i), 1, 1, fc=colour if is_framed else pale(colour),
                                 ec=INSIDE if is_framed else INK, lw=1.5 if is_framed else 0.4, zorder=2 + is_framed))
        if across <= 40:
            axes.text(j + 0.5, i + 0.5, who, ha="center", va="center", fontsize=7, zorder=4, color=INSIDE,
                      weight="bold" if is_framed else "normal")
    axes.set(xlim=(0, across), ylim=(down, 0), title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(visible=False)


def draw_tiles(axes, title, x_shape, w_shape, tile, marked=(0, 0), in_tile=None):
    """Draws a product as one writes it by hand: `x` [rows, k] on the left, the columns of `w` [k, n] above, `y` where
    they meet, cut into tiles of tile = (rows, columns, k). What the block of threads at `marked` reads and computes is
    blue, strongly what it reads first, with arrows along k; in_tile = (rows, columns) of one of its threads is red."""
    (rows, k), (_, n) = x_shape, w_shape
    gap = 0.08 * max(rows + k, n + k)
    origins = {"x": (0, k + gap, k, rows), "w": (k + gap, 0, n, k), "y": (k + gap, k + gap, n, rows)}
    steps = {"x": (tile[2], tile[0]), "w": (tile[1], tile[2]), "y": (tile[1], tile[0])}
    i, j = marked
    blue = {"x": (0, i * tile[0], k, tile[0]), "w": (j * tile[1], 0, tile[1], k),
            "y": (j * tile[1], i * tile[0], tile[1], tile[0])}
    for name, (left, top, width, height) in origins.items():
        axes.add_patch(Rectangle((left, top), width, height, fc="none", ec=INK, lw=1.2))
        across, down = steps[name]
        axes.vlines(np.arange(left, left + width, across), top, top + height, color=INK, lw=0.4)
        axes.hlines(np.arange(top, top + height, down), left, left + width, color=INK, lw=0.4)
        x, y, w, h = blue[name]
        axes.add_patch(Rectangle((left + x, top + y), w, h, fc=BLUE, alpha=0.45, ec="none"))
        if name != "y":
            w, h = min(w, across), min(h, down)
            axes.add_patch(Rectangle((left + x, top + y), w, h, fc=BLUE, ec="none"))
            ahead = (tile[2], 0) if name == "x" else (0, tile[2])
            middle = left + x + w / 2, top + y + h / 2
            axes.annotate("", (middle[0] + ahead[0], middle[1] + ahead[1]), middle,
                          arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.5})
        axes.text(left + width / 2, top - 0.2 * gap, name, ha="center", va="bottom", weight="bold")
    if in_tile:
        left, top = origins["y"][0] + j * tile[1], origins["y"][1] + i * tile[0]
        axes.add_patch(Rectangle((left, top), in_tile[1], in_tile[0], fc=RED, ec=RED, lw=2))
    axes.set(xlim=(-0.3 * gap, k + gap + n + 0.3 * gap), ylim=(k + gap + rows + 0.3 * gap, -gap), title=title,
             aspect="equal")
    axes.axis("off")


def draw_banks(words, title, axes):
    """Draws which lanes need the same of the 32 banks of shared memory: a stack of lane numbers over each bank. words:
    the word of each lane (int [lanes]); lanes with the same word count once. Returns the number of turns."""
    stacks = [[] for _ in range(32)]
    for lane, word in enumerate(words):
        stack = stacks[word % 32]
        if word not in [other for _, other in stack]:
            stack.append((lane, word))
    turns = max(map(len, stacks))
    for bank, stack in enumerate(stacks):
        for height, (lane, _) in enumerate(stack):
            axes.add_patch(Rectangle((bank, height), 1, 1, fc=RED if len(stack) > 1 else GREEN, ec=INK, lw=0.5,
                                     alpha=0.85))
            axes.text(bank + 0.5, height + 0.5, lane, ha="center", va="center", fontsize=6, color=INSIDE)
    axes.set(xlim=(0, 32), ylim=(0, max(turns, 2)), xlabel="bank", ylabel="turn",
             title=f"{title}: {turns} turn{'s' * (turns > 1)}", xticks=np.arange(0, 32, 4) + 0.5,
             yticks=np.arange(turns) + 0.5)
    axes.set_xticklabels(range(0, 32, 4))
    axes.set_yticklabels(range(1, turns + 1))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    return turns


# ---- checks of the text's own kernels ----------------------------------------------------------------------

def expect(name, found, wanted, allowed):
    """Raises AssertionError, with a sentence, unless each result of a kernel of the text is nearer than `allowed` (a
    number, or one for each result) to what is wanted."""
    wrong = np.argwhere(~(abs(found - wanted) < allowed))       # what was never written is poison: not a number
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        raise AssertionError(
            f"{name}: {len(wrong):,} of {found.size:,} results are wrong; [{', '.join(map(str, at))}] is "
            f"{found[at]:.4g}, not {wanted[at]:.4g}. If you have changed a number in this cell, put the old one back, "
            "or change what goes with it")


# ---- tasks -------------------------------------------------------------------------------------------------

def attempt(check, answer):
    """Runs the check of a task on the reader's answer, or says that there is none yet. If the check
    fails, or a kernel touches what it must not or cannot be compiled, says so in words; then the notebook goes on."""
    if answer is None:
        print("not solved yet")
        return
    try:
        check(_that_returns(_number_in(answer)))
        print("solved")
    except TypeError as error:
        if "object is not callable" in str(error) and not callable(answer):
            print(f"not right yet: a function is wanted, and {answer!r} is none")
            return
        if str(error) != f"{type(answer).__name__!r} object is not subscriptable":
            raise
        print(f"not right yet: {NO_KERNEL}")
    except (AssertionError, LaunchError, CompileError) as error:
        print(f"not right yet: {brief(error)}")
        if re.search(r"\bnan\b", str(error)):              # results are filled with nan before a launch
            print("(nan: something was never written, or made of what was not)")


def _that_returns(answer):
    """The answer, if it is a plain function, such that it complains about wrong arguments and about a missing result;
    any other answer as it is."""
    if not isinstance(answer, FunctionType):
        return answer

    @functools.wraps(answer)
    def answered(*args, **settings):
        try:
            inspect.signature(answer).bind(*args, **settings)
        except TypeError as error:
            raise AssertionError(f"{answer.__name__} is called with {len(args)} arguments: {error}") from None
        result = answer(*args, **settings)
        assert result is not None, f"{answer.__name__} returns nothing: is there a `return`?"
        return result

    return answered


def refuses(check, wrong):
    """Raises RuntimeError if the check of a task accepts a wrong answer."""
    try:
        check(wrong)
    except (AssertionError, LaunchError):
        return
    raise RuntimeError("the check is satisfied with a wrong answer")


# ---- errors in few words -----------------------------------------------------------------------------------

NO_KERNEL = "a kernel is launched as kernel[blocks, threads](...); this is none. Is @cuda.jit above it?"
NO_BLOCKS = "a kernel is launched with its blocks and threads: kernel[blocks, threads](...)"
NO_DRIVER = ("no NVIDIA driver is here, which Numba's own functions need. Here card.upload(x), card.alloc(n, dtype) "
             "and card.zeros(n, dtype) give arrays, card.download(y) brings one back, card.synchronize() waits; "
             "@cuda.jit stands without types, and a launch names blocks and threads: kernel[8, 128](y, x)")


def brief(error):
    """What is wrong with a kernel, in a few lines: line and thread, or what the compiler did not understand. For a
    NameError: the name that the cell does not know."""
    if isinstance(error, NameError):
        return f"{error}: was the cell run that defines it?"
    if isinstance(error, TypeError) and "not subscriptable" in str(error):
        return NO_KERNEL
    if str(error) == missing_launch_config_msg:
        return NO_BLOCKS
    if isinstance(error, CudaSupportError):
        return NO_DRIVER
    if not isinstance(error, CompileError):
        words = re.sub(r"\(\d+\.py, line", "(line", str(error))         # the file of a cell: a number that says nothing
        return re.sub(r"0x[0-9a-f]{6,}", "0x...", words)                # and so does where an array lies this time
    cause = error.__cause__
    kernel = re.match(r"kernel (\w+)", str(error))[1]
    words = _in_plain_words(re.sub(r"Failed in \w+ mode pipeline \(step: [\w ]+\)\n", "", str(cause)).strip())
    file, line = _place(cause)
    if not line:
        return f"{kernel} cannot be compiled: {words}"
    return (f"{kernel}, line {line}, cannot be compiled: {words}\n"
            f"    line {line}: {linecache.getline(file, line).strip()}")


NO_LISTS = ("a kernel has no lists and makes no arrays: cuda.local.array is there for a few numbers of a thread, "
            "cuda.shared.array for those of a block")
PLAIN_WORDS = (             # what the compiler says -> what that means for the writer of a kernel
    (r"TypingError: ((?:a float32 is|bits are) wanted, .*)", r"\1"),
    (r"NRT required but not enabled", NO_LISTS),
    (r"set_try_status", "a kernel has no `try`"),
    (r"cannot tell what \w+ of type type compiles to.*",
     "it calls a function of Python: is @cuda.jit(device=True) above that one?"),
    (r"No conversion from .* to none for '\$\w+return_value", "a kernel returns nothing: it writes to an array"),
    (r"liveness info missing for vars.*", "a loop never ends: does anything in it change its condition?"),
    (r"typing\(\) missing \d+ required positional arguments?: (.*)", r"an argument is missing: \1"),
    (r"<function (shared|local)\.array .*", r"the shape of a \1 array is a constant, or a tuple of constants"),
    (r">>> (?:(?:zeros|ones|empty|full)(?:_like)?|arange|linspace|eye|concatenate|stack|repeat)\("
     r"|>>> .*\blist\(|attribute '\w+' of type list|global name 'list'", NO_LISTS),
    (r">>> .*\bnone\b.*", "nothing stands where a value is wanted: does a function lack its `return`?"),
    (r"(?:>>> |Cannot cast ).*?UniTuple\((\w+) x (\d+)\).*", r"\2 of \1 stand where one is wanted: which of them?"),
    (r">>> array\(", NO_LISTS),
    (r">>> (?:dot|matmul)\(", "a kernel has no products of matrices: it is a loop that adds up"),
    (r">>> (.*)", r"there is no \1"),
    (r"Untyped global name '(\w+)': .*<class 'function'>.*",
     r"\1 is a function of Python: is @cuda.jit(device=True) above it?"),
    (r"(Unknown attribute '\w+' of type \w+).*", r"\1"),
)


def _in_plain_words(said):
    """The compiler's message in one sentence."""
    for pattern, words in PLAIN_WORDS:
        found = re.search(pattern, said)
        if found:
            return found.expand(words)
    return re.sub(r"^NameError: |\. Raised from None$", "", said.split("\n")[0])


def _place(error):
    """(file, line) of the reader's source at which the compiler stopped, or ("", 0). If Numba's message does not name
    the line, a frame of the compiler does, or the code that uses an unknown name. For a loop that never ends it is the
    first line."""
    for file, line in re.findall(r"at (\S+) \((\d+)\)", str(error)):
        if _is_readers(file):
            return file, int(line)
    found, trace = ("", 0), error.__traceback__
    while trace:
        names = trace.tb_frame.f_locals
        place = getattr(names.get("self"), "loc", None) or names.get("loc")
        if getattr(place, "line", None) and _is_readers(getattr(place, "filename", "")):
            found = place.filename, place.line
        code = getattr(getattr(names.get("self"), "func_id", None), "code", None)
        unknown = re.search(r"name '(\w+)' is not defined", str(error))
        if unknown and code:
            line = next((step.positions.lineno for step in dis.get_instructions(code) if step.argval == unknown[1]), 0)
            found = (code.co_filename, line) if line else found
        if "never ends" in _in_plain_words(str(error)) and "cfg" in names:
            places = [statement.loc for loop in names["cfg"].loops().values() if not loop.exits
                      for block in loop.body for statement in names["blocks"][block].body]
            found = min(((place.filename, place.line) for place in places), default=found)
        trace = trace.tb_next
    return found


def _is_readers(file):
    """Whether a file belongs to a cell or to the project, not to a library. An error of an intrinsic is shown where the
    intrinsic is called."""
    return file.endswith(".py") and "site-packages" not in file and not file.endswith("kernels/intrinsics.py")


def _passes(trace, place):
    """Whether an error has passed through this file or folder of the project."""
    return any(frame.filename.startswith(str(ROOT / place)) for frame in traceback.extract_tb(trace))


def _show_briefly(shell, kind, error, trace, tb_offset=None):
    """An error about a kernel, as a cell that has failed shows it: without the frames of the compiler and the card. So
    is what a check asserts in words, why the engine refuses a product, that a driver or a decorator is missing, that an
    array is not NumPy's, and that *Interrupt* has ended a kernel."""
    if kind is KeyboardInterrupt and _passes(trace, "kernels/emulated"):
        error = KeyboardInterrupt("the kernels that ran were ended; what they have written until then remains")
    is_told = {ValueError: str(error) == missing_launch_config_msg or _passes(trace, "engine/own_products.py"),
               TypeError: str(error) in (ON_A_CARD, "'function' object is not subscriptable"),
               AttributeError: str(error).endswith(ON_A_CARD)}
    if not str(error) or not all(told for each, told in is_told.items() if issubclass(kind, each)):
        return shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)
    lines = [f"{kind.__name__}: {brief(error)}"]
    shell._showtraceback(kind, error, lines)
    return lines


if get_ipython():
    get_ipython().set_custom_exc((CompileError, LaunchError, AssertionError, NameError, ValueError, TypeError,
                                  AttributeError, CudaSupportError, KeyboardInterrupt), _show_briefly)
    get_ipython().events.register("pre_run_cell", _stand_in)
    Configured.careful = _careful
    get_ipython().events.register("post_run_cell", _tell_disturbance)
