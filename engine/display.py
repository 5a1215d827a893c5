"""How a loaded model shows itself: a line for `repr`, a table for notebooks. And what its kernels did, counted."""

import html
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kernels.card import show_bytes
from kernels.emulated.estimate import PIPES, SECTOR, Counts


def facts_of(engine) -> list[tuple[str, str]]:
    """What a person wants to know of an engine, as (name, value)."""
    c, kinds = engine.config, Counter(engine.config.layer_kinds)
    layers = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    facts = [("model", engine.name), ("layers", f"{c.n_layers} ({layers}), hidden size {c.hidden_dim:,}, vocabulary "
                                                f"{c.n_vocab:,}")]
    for stage in engine.pipeline.stages:
        where = f", layers {stage.layers.start} - {stage.layers.stop - 1}" if len(engine.cards) > 1 else ""
        facts.append(("card", f"{stage.card.describe()}{where}: {show_bytes(stage.weight_bytes)} of weights, "
                                       f"{show_bytes(stage.card.free_bytes)} free"))
    facts.append(("context", f"{engine.n_slots} x {engine.n_ctx:,} tokens"))
    facts.append(("reads", "text and pictures" if engine.eyes else "text"))
    return facts + ([("stopped", engine.reason)] if engine.reason else [])


def in_a_line(engine) -> str:
    """`repr` of an engine."""
    cards = ", ".join(card.name for card in engine.cards)
    stopped = f", stopped: {engine.reason}" if engine.reason else ""
    return f"<qengine {engine.name} on {cards}, {engine.n_slots} x {engine.n_ctx:,} tokens{stopped}>"


def as_html(engine) -> str:
    """A table for notebooks."""
    return html_table(["", ""], facts_of(engine))


def html_table(head: list[str], rows) -> str:
    """A table of texts. It has no colours of its own, so it is readable in light and dark."""
    def line(cells, tag):
        style = ' style="text-align: left"'
        return "<tr>" + "".join(f"<{tag}{style}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + (line(head, "th") if any(head) else "") + "".join(line(row, "td") for row in rows) + "</table>"


# ---- what kernels did --------------------------------------------------------------------------------------


class Tally:
    """What launches did, by kernel and pipe. counts: kernel -> Counts; launches: kernel -> how many. Complete when
    `counting` has ended."""

    def __init__(self):
        self.counts: dict[str, Counts] = {}
        self.launches = Counter()

    def add(self, log: list):
        """Adds what `Card.counting` has logged."""
        for launch in log:
            self.counts[launch.kernel] = self.counts.get(launch.kernel, Counts()) + launch.counts
            self.launches[launch.kernel] += 1

    def pipes(self) -> dict[str, dict[str, int]]:
        """kernel -> pipe -> instructions of warps; the kernel with the most first, and only pipes with work."""
        found = {kernel: {pipe.rstrip("_"): n for pipe in PIPES if pipe != "move" and (n := getattr(counts, pipe))}
                 for kernel, counts in self.counts.items()}
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def rows(self) -> list[list[str]]:
        """A row for each kernel and one for all: name, launches, megabytes that memory must move, warp instructions,
        and the pipes with the most of them."""
        pipes, rows = self.pipes(), []
        for kernel, own in pipes.items():
            rows.append(self._row(kernel, self.launches[kernel], self.counts[kernel], own))
        together = sum((Counter(own) for own in pipes.values()), Counter())
        return rows + [self._row("all", self.launches.total(), sum(self.counts.values(), Counts()), together)]

    @staticmethod
    def _row(name: str, launches: int, counts: Counts, pipes: dict) -> list[str]:
        n = sum(pipes.values())
        most = sorted(pipes.items(), key=lambda item: -item[1])[:4]
        shares = ", ".join(f"{pipe} {100 * of / n:.0f} %" for pipe, of in most)
        return [name, f"{launches:,}", f"{SECTOR * counts.distinct_sectors / 1e6:,.2f}", f"{n:,}", shares]

    HEAD = ["kernel", "launches", "MB", "warp instructions", "most of them"]

    def __repr__(self):
        rows = [self.HEAD, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.HEAD))]
        return "\n".join("  ".join(f"{cell:<{width}}" if i in (0, 4) else f"{cell:>{width}}"
                                   for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)

    def _repr_html_(self):
        return html_table(self.HEAD, self.rows())

    def plot(self, most: int = 12):
        """Bars of the `most` busiest kernels, cut into pipes. Returns the axes of Matplotlib, which must be there."""
        import matplotlib.pyplot as plt         # here: only a picture needs it
        pipes = dict(list(self.pipes().items())[:most])
        kernels, names = list(pipes), sorted({pipe for own in pipes.values() for pipe in own})
        _, axes = plt.subplots(figsize=(8, 1 + 0.35 * len(kernels)), layout="constrained")
        left = [0] * len(kernels)
        for name, colour in zip(names, plt.cm.tab20.colors):
            widths = [pipes[kernel].get(name, 0) for kernel in kernels]
            axes.barh(kernels, widths, left=left, label=name, color=colour)
            left = [a + b for a, b in zip(left, widths)]
        axes.invert_yaxis()
        axes.set(xlabel="warp instructions")
        if kernels:
            axes.legend(fontsize="small", bbox_to_anchor=(1, 1))        # beside the bars
        return axes


@contextmanager
def counting(engine) -> Iterator[Tally]:
    """Counts what the engine's emulated cards do while the `with` body runs; it takes a hundred times as long. Yields a
    Tally, which is complete at the end. ValueError for real cards, which count nothing.

        with engine.counting() as tally:
            engine.generate("Once", max_tokens=4)
        print(tally)                            # in a notebook: tally, and tally.plot()
    """
    if any(card.kind != "emulated" for card in engine.cards):
        raise ValueError('only emulated cards count instructions: qengine.load(model, card="emulated")')
    tally = Tally()
    with ExitStack() as stack:
        logs = [stack.enter_context(card.counting()) for card in engine.cards]
        yield tally
    for log in logs:
        tally.add(log)
