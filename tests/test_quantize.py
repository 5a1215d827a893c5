import pytest

from kernels import quantize


@pytest.mark.parametrize("case", quantize.CASES, ids=str)
def test_bits_equal_the_reference(card, case):
    quantize.check(card, *case)


@pytest.mark.parametrize("case", quantize.CASES, ids=str)
def test_bits_of_the_rest_equal_the_reference(card, case):
    quantize.check_rest(card, *case)
