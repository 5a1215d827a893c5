"""Formats of weights, by what products do differently for them, and formats of keys and values. Tests that compile long
run with a format of each kind, and with all formats if slow tests are asked for. Shorter tests cover all formats in
every run."""

import itertools

import pytest

from kernels.formats import FORMATS
from kernels.kv_formats import KV_FORMATS
from kernels.limits import FLOAT16
from kernels.quant_gemv import PACKED
from kernels.rope import SHAPES


def kind(format):
    """What a product does differently: minima, integer scales of halves, two float scales, a code book."""
    return format.minima > 0, format.halves, format.float_scales, format.book_bytes > 0


FIRST = {kind(format): format.name for format in reversed(PACKED)}      # the first packed format of each kind


def _fewest():
    """The names of the fewest formats of FIRST in which each part of a kind has all of its values."""
    def parts(kinds):
        return {part for kind in kinds for part in enumerate(kind)}

    return next([FIRST[kind] for kind in kinds] for n in itertools.count(1)
                for kinds in itertools.combinations(FIRST, n) if parts(kinds) == parts(FIRST))


FEW = _fewest()


def of_each_kind(others, names=FIRST.values()):
    """The names of all formats for `parametrize`. Those that are neither Q8_0 nor among `names`, the first of their
    kind by default, have the mark `others`."""
    return [name if name in (*names, "Q8_0") else pytest.param(name, marks=others) for name in FORMATS]


BY_KIND = of_each_kind(pytest.mark.slow)
BY_FEW = of_each_kind(pytest.mark.slow, FEW)            # where other tests have the same parts for each kind
BY_KIND_IF_EMULATED = of_each_kind(pytest.mark.slow_if_emulated)        # a real card has all of them in every run


# KV formats in which every kind of rows of few bits occurs: those that whole engines are compiled for in every run.
KV_KINDS = "q8+3", "q4"
KV_BY_KIND = [name if name in KV_KINDS else pytest.param(name, marks=pytest.mark.slow)
              for name, format in KV_FORMATS.items() if format.expands]


def of_formats(cases, *more, every=False):
    """(KV format, case, *more) for `parametrize`; a part of a case is the shape of the heads. float16 has every case.
    Formats of few bits have the first one of each head width, which decides what they do differently: those of
    KV_KINDS, and the others if slow tests are asked for. every: of those others, the first case of all in every run."""
    first = list({next(part for part in case if part in SHAPES)[0]: case for case in reversed(cases)}.values())

    def is_run(format, case):
        if format.name in KV_KINDS:
            return case in first
        return format.name == FLOAT16 or every and case == cases[0]
    return [(format, case, *more) if is_run(format, case) else pytest.param(format, case, *more, marks=pytest.mark.slow)
            for format in KV_FORMATS.values() for case in cases]
