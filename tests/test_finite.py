import pytest

from kernels import finite


@pytest.mark.parametrize("dtype", finite.EXPONENTS)
def test_values_that_are_not_finite_are_found(card, dtype):
    finite.check(card, dtype)
