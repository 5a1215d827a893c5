import pytest

from kernels import repack


@pytest.mark.parametrize("case", repack.CASES, ids=str)
def test_q8_0_equals_the_reference_bit_for_bit(card, case):
    repack.check(card, case)


@pytest.mark.parametrize("dtype", repack.EXPONENTS)
def test_values_that_are_not_finite_are_found(card, dtype):
    repack.check_nonfinite(card, dtype)
