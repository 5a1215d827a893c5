"""Formats of weights by what products do differently for them. Tests that compile long run with a format of each kind,
and with all formats if slow tests are asked for. Shorter tests cover all formats in every run."""

import pytest

from kernels.formats import FORMATS
from kernels.quant_gemv import PACKED


def kind(format):
    """What a product does differently: minima, integer scales of halves, two float scales, a code book."""
    return format.minima > 0, format.halves, format.float_scales, format.book_bytes > 0


FIRST = {kind(format): format.name for format in reversed(PACKED)}      # the first packed format of each kind


def of_each_kind(others):
    """The names of all formats for `parametrize`. Those that are not the first of their kind have the mark `others`."""
    return [name if name in (*FIRST.values(), "Q8_0") else pytest.param(name, marks=others) for name in FORMATS]


BY_KIND = of_each_kind(pytest.mark.slow)
BY_KIND_IF_EMULATED = of_each_kind(pytest.mark.slow_if_emulated)        # a real card has all of them in every run
