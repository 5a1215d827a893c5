import pytest

from kernels import advance


@pytest.mark.parametrize("rows", advance.CASES)
def test_equals_the_reference(card, rows):
    advance.check(card, rows)
