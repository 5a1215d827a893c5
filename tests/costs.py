"""StageCosts of layers that exist only as numbers, for tests of passes and micro-batches."""

import collections
import math
from types import SimpleNamespace

from engine.plan import StageCosts, Work, choose_rows, passes_over, slowest_seconds
from kernels.probe import Speed

SPEED = Speed(dot=1e14, half2=1e14, read=1e12, link=1e9)


def work_of(products, n_layers=1, **fields):
    """The Work of layers that have these matrix products, {(n, k): count}, and no others."""
    operations = 2 * sum(count * n * k for (n, k), count in products.items())
    return Work(n_layers, collections.Counter(products), **{"row_operations": operations} | fields)


def costs_of(hidden_dim, work, n_sms=132, kind="cuda", speed=SPEED, **card):
    """The StageCosts of such layers on a card that is only a number of SMs, a kind and other attributes."""
    return StageCosts(SimpleNamespace(n_sms=n_sms, kind=kind, **card), hidden_dim, work, speed)


def costs_of_square(n_sms=132, n=4096, kind="cuda", **fields):
    """The StageCosts of one layer with one product of n x n."""
    return costs_of(n, work_of({(n, n): 1}, **fields), n_sms, kind)


def costs_of_27b():
    """The StageCosts of half of a 27B on an H200 whose link takes no time: 24 layers of DeltaNet and 8 of attention,
    whose queries have 24 heads of 256."""
    products = {(34_816, 5120): 32, (5120, 17_408): 32, (5120, 6144): 32, (16_480, 5120): 24, (14_336, 5120): 8}
    work = work_of(products, n_layers=32, context_operations=8 * 4 * 24 * 256)
    return costs_of(5120, work, speed=Speed(dot=133.7e12, half2=131e12, read=4.8e12, link=math.inf))


def passes_of(stages, n, limit):
    """The rows of each pass over a prompt of n tokens, on stages with these StageCosts."""
    slowest = slowest_seconds(stages)
    return [rows for _, rows in passes_over(n, lambda start, last: choose_rows(
        start, n, limit, len(stages), slowest, last))]
