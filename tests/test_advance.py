import pytest

from kernels import advance


@pytest.mark.parametrize("n, width", advance.CASES)
def test_equals_the_reference(card, n, width):
    advance.check(card, n, width)
