import pytest

from kernels import checkpoint


@pytest.mark.parametrize("case", checkpoint.CASES)
def test_equals_the_reference(card, case):
    checkpoint.check(card, case)
